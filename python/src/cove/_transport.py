"""Sends calls over HTTP: once for threads, once for event loops, with one idea of headers, waiting and failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import urllib.parse
import urllib.request
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar

import httpx

from . import _wire as wire
from ._calls import DEFAULT_TIMEOUT, PREFIX, Call, Unset, server
from .errors import CoveError, Timeout, Unavailable, Unreachable, fault, from_answer

T = TypeVar("T")

NDJSON = "application/x-ndjson"
CHUNK = 1 << 20
_CONNECT = 10.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=30)
# A run may say nothing for hours: the kernel asks whether the other side still lives, and a dead one is an error within two minutes.
_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)) if hasattr(socket, name)]


class _Settings:
    """Whom to ask, as whom, and how long to wait."""

    def __init__(self, url: str | None, api_key: str | None, timeout: float | None, headers: Mapping[str, str] | None) -> None:
        self.url, key = server(url, api_key)
        self.timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self.headers = {"User-Agent": "cove-python", **({"X-API-Key": key} if key else {}), **(headers or {})}

    def options(self) -> dict[str, Any]:
        # Without TLS nothing has to be read for it, which would take longer than a run.
        return {"limits": _LIMITS, "verify": self.url.startswith("https://")}

    def request(self, call: Call[Any], accept: str | None) -> httpx.Request:
        headers = {**self.headers, "Accept": accept or call.accept, **(call.headers or {}), **trace_headers()}
        content = call.content
        if call.json is not None:
            content = json.dumps(call.json).encode()
            headers["Content-Type"] = "application/json"
        elif content is not None:
            headers["Content-Type"] = "application/octet-stream"
        patience = self.timeout if call.timeout is Unset else call.timeout
        timeout = {"connect": _CONNECT, "read": patience, "write": patience, "pool": patience}
        url = self.url + PREFIX + call.path + ("?" + urllib.parse.urlencode(call.params) if call.params else "")
        return httpx.Request(call.method, url, content=content, headers=headers, extensions={"timeout": timeout})

    def failed(self, err: httpx.HTTPError) -> CoveError:
        if isinstance(err, httpx.ConnectError | httpx.ConnectTimeout):
            return Unreachable(f"no server answers at {self.url}: start one with `cove serve`, or set COVE_URL ({err})")
        if isinstance(err, httpx.TimeoutException):
            return Timeout(f"the server at {self.url} did not answer in time")
        return Unavailable(f"the connection to {self.url} broke: {err or type(err).__name__}")


def _proxies() -> bool:
    """Whether the environment names any: a transport of ours would go past them."""
    return bool(urllib.request.getproxies())


def trace_headers() -> dict[str, str]:
    """The W3C context of the current span, if anybody here traces."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        TraceContextTextMapPropagator().inject(carrier)
    return carrier


class _Lines:
    """Cuts bytes into lines at newlines and nowhere else: text inside of JSON may hold what Unicode takes for the end of a line."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def cut(self, chunk: bytes) -> list[bytes]:
        if b"\n" not in chunk:  # part of a line that may be megabytes long
            self._rest.append(chunk)
            return []
        *whole, rest = b"".join([*self._rest, chunk]).split(b"\n")
        self._rest = [rest]
        return [line for line in whole if line]


def event(line: bytes) -> wire.Event:
    """One line of a stream; a fault is raised."""
    e = wire.decode(wire.Event, json.loads(line))
    if e.type == "fault" and e.fault:
        raise fault(e.fault.kind, e.fault.message)
    return e


def cut() -> CoveError:
    return Unavailable("the stream was cut before the run ended: the server or the network went away")


class Transport:
    """Sends calls and waits."""

    def __init__(self, url: str | None, api_key: str | None, timeout: float | None, headers: Mapping[str, str] | None) -> None:
        self.settings = _Settings(url, api_key, timeout, headers)
        self._proxied = httpx.Client(**self.settings.options()) if _proxies() else None
        self._direct = httpx.HTTPTransport(**self.settings.options(), socket_options=_ALIVE)

    def close(self) -> None:
        self._direct.close()
        if self._proxied:
            self._proxied.close()

    def _exchange(self, request: httpx.Request) -> httpx.Response:
        # Redirects, cookies and logins are not for this API: without them a call costs half of its time here.
        return self._proxied.send(request, stream=True) if self._proxied else self._direct.handle_request(request)

    def send(self, call: Call[T], accept: str | None = None) -> T:
        with self.open(call, accept) as response:
            return call.read(self._body(response))

    @contextlib.contextmanager
    def open(self, call: Call[Any], accept: str | None = None) -> Iterator[httpx.Response]:
        try:
            response = self._exchange(self.settings.request(call, accept))
        except httpx.HTTPError as err:
            raise self.settings.failed(err) from err
        try:
            if response.status_code >= 400:
                raise from_answer(response.status_code, self._body(response), response.headers.get("X-Request-Id", ""))
            yield response
        finally:
            response.close()

    def _body(self, response: httpx.Response) -> bytes:
        try:
            return response.read()
        except httpx.HTTPError as err:
            raise self.settings.failed(err) from err

    def chunks(self, call: Call[Any]) -> Iterator[bytes]:
        with self.open(call) as response:
            try:
                yield from response.iter_raw(CHUNK)
            except httpx.HTTPError as err:
                raise self.settings.failed(err) from err

    def lines(self, call: Call[Any]) -> Iterator[bytes]:
        pieces = _Lines()
        with self.open(call, NDJSON) as response:
            try:
                for chunk in response.iter_bytes():
                    yield from pieces.cut(chunk)
            except httpx.HTTPError as err:
                raise self.settings.failed(err) from err

    def events(self, call: Call[Any]) -> Iterator[wire.Event]:
        ended = False
        for line in self.lines(call):  # to its end, so that the connection can be used again
            e = event(line)
            ended = e.type == "end"
            yield e
        if not ended:
            raise cut()


class AsyncTransport:
    """Sends calls without blocking the loop. Each event loop has connections of its own, so one client serves them all."""

    def __init__(self, url: str | None, api_key: str | None, timeout: float | None, headers: Mapping[str, str] | None) -> None:
        self.settings = _Settings(url, api_key, timeout, headers)
        self._lock = threading.Lock()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient | httpx.AsyncHTTPTransport] = weakref.WeakKeyDictionary()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        client = self._client()
        return await client.send(request, stream=True) if isinstance(client, httpx.AsyncClient) else await client.handle_async_request(request)

    def _client(self) -> httpx.AsyncClient | httpx.AsyncHTTPTransport:
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                options = self.settings.options()
                client = httpx.AsyncClient(**options) if _proxies() else httpx.AsyncHTTPTransport(**options, socket_options=_ALIVE)
                self._clients[loop] = client
            return client

    async def close(self) -> None:
        with self._lock:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client:
            await client.aclose()

    async def send(self, call: Call[T], accept: str | None = None) -> T:
        async with self.open(call, accept) as response:
            return call.read(await self._body(response))

    @contextlib.asynccontextmanager
    async def open(self, call: Call[Any], accept: str | None = None) -> AsyncIterator[httpx.Response]:
        try:
            response = await self._exchange(self.settings.request(call, accept))
        except httpx.HTTPError as err:
            raise self.settings.failed(err) from err
        try:
            if response.status_code >= 400:
                raise from_answer(response.status_code, await self._body(response), response.headers.get("X-Request-Id", ""))
            yield response
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.HTTPError as err:
            raise self.settings.failed(err) from err

    async def chunks(self, call: Call[Any]) -> AsyncGenerator[bytes, None]:
        async with self.open(call) as response:
            try:
                async for chunk in response.aiter_raw(CHUNK):
                    yield chunk
            except httpx.HTTPError as err:
                raise self.settings.failed(err) from err

    async def lines(self, call: Call[Any]) -> AsyncGenerator[bytes, None]:
        pieces = _Lines()
        async with self.open(call, NDJSON) as response:
            try:
                async for chunk in response.aiter_bytes():
                    for line in pieces.cut(chunk):
                        yield line
            except httpx.HTTPError as err:
                raise self.settings.failed(err) from err

    async def events(self, call: Call[Any]) -> AsyncGenerator[wire.Event, None]:
        ended = False
        async with contextlib.aclosing(self.lines(call)) as lines:
            async for line in lines:
                e = event(line)
                ended = e.type == "end"
                yield e
        if not ended:
            raise cut()

"""A span for each snippet, and a tracer that shows spans somewhere."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode, Tracer

from cove.otel._snippet import ExecResult, arun_snippet, run_snippet

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "sandbox.exec"
DEFAULT_SERVICE = "langgraph-sandbox-agent"
_PREVIEW, _DESCRIPTION = 200, 120

_providers: weakref.WeakSet[Any] = weakref.WeakSet()


class _CurrentStdout:
    """What sys.stdout is at the moment of writing: the console exporter's own default is what it was when that was imported."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


def configure_tracing(service_name: str = DEFAULT_SERVICE, *, exporter: SpanExporter | None = None, batch: bool | None = None) -> Tracer:
    """A tracer whose spans are shown: on the present stdout, or where the standard OTEL_* variables say.

    With OTEL_EXPORTER_OTLP_ENDPOINT (or _TRACES_ENDPOINT, or OTEL_TRACES_EXPORTER=otlp) spans go there, by gRPC or HTTP as
    OTEL_EXPORTER_OTLP_PROTOCOL says. An exporter given here wins. Spans on the console appear as they close; others are sent in
    batches, and all of them before the process ends (force_flush sends them now).

    The provider becomes the process's own if there is none yet. If there is one, it stays, and the tracer works beside it.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service_name) if service_name == DEFAULT_SERVICE else service_name
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    sent_away = exporter is not None or _exporter_name() == "otlp"
    exporter = exporter or _exporter()
    if exporter is not None:
        batched = sent_away if batch is None else batch
        provider.add_span_processor(BatchSpanProcessor(exporter) if batched else SimpleSpanProcessor(exporter))
    _providers.add(provider)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider)
    return provider.get_tracer(service_name)


def force_flush(timeout_millis: int = 30_000) -> bool:
    """Sends what the tracers of configure_tracing still hold; False when it took too long."""
    return all([provider.force_flush(timeout_millis) for provider in list(_providers)])


def _setting(name: str) -> str:
    """A standard variable, in its form for traces or for everything."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _exporter_name() -> str:
    named = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if named not in ("", "console", "otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {named!r}; cove.otel knows console, otlp and none, or give configure_tracing an exporter")
    return named or ("otlp" if _setting("ENDPOINT") else "console")


def _exporter() -> SpanExporter | None:
    match _exporter_name():
        case "none":
            return None
        case "otlp":
            return _otlp()
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter(out=_CurrentStdout())  # type: ignore[arg-type]


def _otlp() -> SpanExporter:
    """The exporter of the protocol that is named, else of the one whose port the endpoint has; addresses and headers it reads itself."""
    protocol = _setting("PROTOCOL") or ("grpc" if urlsplit(_setting("ENDPOINT")).port == 4317 else "http/protobuf")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            return Grpc()
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return Http()
    except ImportError as e:
        raise ImportError("OTLP needs its exporter: pip install 'cove-sandbox[otel]'") from e
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; cove.otel knows grpc and http/protobuf")


def _begin(span: Span, code: str, timeout: float, mem_mb: int, capture_code: bool) -> None:
    asked = {"sandbox.timeout_s": float(timeout), "sandbox.mem_limit_mb": int(mem_mb), "sandbox.code_length": len(code)}
    span.set_attributes({**asked, "sandbox.code": code} if capture_code else asked)


def _end(span: Span, result: ExecResult, timeout: float) -> None:
    span.set_attributes(
        {
            "sandbox.timed_out": result.timed_out,
            "sandbox.exit_code": result.exit_code,
            "sandbox.stdout_bytes": len(result.stdout.encode(errors="replace")),
            "sandbox.stderr_preview": result.stderr[:_PREVIEW],
        }
    )
    if result.exit_code == 0 and not result.timed_out:
        span.set_status(StatusCode.OK)
        return
    why = result.stderr or (f"timed out after {timeout:g} seconds" if result.timed_out else f"exit code {result.exit_code}")
    span.set_status(StatusCode.ERROR, description=why[:_DESCRIPTION])


def traced_run(
    tracer: Tracer,
    code: str,
    timeout: float = 10.0,
    cpu_seconds: int = 8,
    mem_mb: int = 128,
    allowed_env_keys: list[str] | None = None,
    *,
    runner: Callable[..., ExecResult] = run_snippet,
    capture_code: bool = False,
    **options: Any,
) -> ExecResult:
    """run_snippet within a span `sandbox.exec`, which is current while the code runs: the server's spans are below it.

    The code itself is in no attribute unless capture_code; of its stderr the first 200 characters are. runner is what runs the code,
    with run_snippet's arguments; options are passed on to it.
    """
    with tracer.start_as_current_span(SPAN) as span:
        _begin(span, code, timeout, mem_mb, capture_code)
        result = runner(code, timeout=timeout, cpu_seconds=cpu_seconds, mem_mb=mem_mb, allowed_env_keys=allowed_env_keys, **options)
        _end(span, result, timeout)
        return result


async def atraced_run(
    tracer: Tracer,
    code: str,
    timeout: float = 10.0,
    cpu_seconds: int = 8,
    mem_mb: int = 128,
    allowed_env_keys: list[str] | None = None,
    *,
    runner: Callable[..., Awaitable[ExecResult]] = arun_snippet,
    capture_code: bool = False,
    **options: Any,
) -> ExecResult:
    """traced_run for coroutines."""
    with tracer.start_as_current_span(SPAN) as span:
        _begin(span, code, timeout, mem_mb, capture_code)
        result = await runner(code, timeout=timeout, cpu_seconds=cpu_seconds, mem_mb=mem_mb, allowed_env_keys=allowed_env_keys, **options)
        _end(span, result, timeout)
        return result

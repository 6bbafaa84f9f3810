"""Fixtures of the suite, and its report: one JSON line for each test, with the SDK methods that the test proves."""

import importlib.metadata
import os
import uuid
from datetime import timedelta

import httpx
import pytest
from suite import aeventually, eventually, note  # noqa: F401 tests take the first two from here

from code_interpreter import CodeInterpreter, CodeInterpreterSync
from opensandbox import Sandbox, SandboxManager, SandboxManagerSync, SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync

IMAGE = "opensandbox/code-interpreter:v1.1.0"  # a name that the server maps to a template of its own
LIFETIME = timedelta(minutes=20)  # what a test leaves behind is gone after it
NEWEST = not importlib.metadata.version("opensandbox").startswith("0.")

# What a Pod refuses, which one machine does.
collect_ignore = [] if os.environ.get("OPENSANDBOX_SUITE_DRIVER") == "kubernetes" else ["test_refused.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if not NEWEST and item.get_closest_marker("newest"):
            item.add_marker(pytest.mark.skip(reason="the package of June has no such method"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    sdk = "python-async" if "async" in os.path.basename(str(item.fspath)) else "python"
    note(os.environ.get("OPENSANDBOX_SUITE_REPORT"), sdk if NEWEST else f"{sdk}-june", item, call, report)


def line(text):
    """A line without its ending: the newest SDK is given it, that of June was not."""
    return text.removesuffix("\n").removesuffix("\r")


def out(execution):
    """What a command printed, line by line."""
    return [line(m.text) for m in execution.logs.stdout]


def err(execution):
    return "\n".join(line(m.text) for m in execution.logs.stderr)


class Wire:
    """Plain HTTP to the server: what an SDK sends, where a test must see the very bytes of the answer."""

    def __init__(self):
        self.url = "http://" + os.environ["OPEN_SANDBOX_DOMAIN"]
        self.key = os.environ["OPEN_SANDBOX_API_KEY"]
        self.client = httpx.Client(timeout=120)

    def api(self, method, path, key=None, **kw):
        headers = {"OPEN-SANDBOX-API-KEY": self.key if key is None else key, **kw.pop("headers", {})}
        return self.client.request(method, self.url + "/v1" + path, headers=headers, **kw)

    def at(self, endpoint, method, path, **kw):
        """A request to an endpoint, with the headers that it came with."""
        headers = {**endpoint.headers, **kw.pop("headers", {})}
        return self.client.request(method, f"http://{endpoint.endpoint}{path}", headers=headers, **kw)

    def made(self, tag):
        """How many sandboxes there are of those that a test marked: others run at the same time."""
        return self.api("GET", f"/sandboxes?metadata=run%3D{tag}").json()["pagination"]["totalItems"]


@pytest.fixture(scope="session")
def wire():
    w = Wire()
    yield w
    w.client.close()


@pytest.fixture
def tag():
    """A word that no other test uses."""
    return "t" + uuid.uuid4().hex[:12]


@pytest.fixture
def make():
    """Makes sandboxes for one test."""
    made = []

    def make(image=IMAGE, **kw):
        kw.setdefault("timeout", LIFETIME)
        sbx = SandboxSync.create(None if "snapshot_id" in kw else image, **kw)
        made.append(sbx)
        return sbx

    yield make
    for sbx in made:
        kill(sbx)


def kill(sbx):
    """Ends a sandbox that a test may have ended itself."""
    try:
        sbx.kill()
    except Exception as gone:
        assert getattr(gone, "status_code", None) == 404, gone
    sbx.close()


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox that the tests of a module share: they leave it as they found it."""
    sbx = SandboxSync.create(IMAGE, timeout=timedelta(hours=2))
    yield sbx
    kill(sbx)


@pytest.fixture(scope="module")
def code(sandbox):
    """The shared sandbox with its interpreter."""
    return CodeInterpreterSync.create(sandbox)


@pytest.fixture
def folder(sandbox, tag):
    """A directory of the shared sandbox for one test."""
    path = f"/tmp/{tag}"
    sandbox.commands.run(f"mkdir {path}")
    yield path
    sandbox.files.delete_directories([path])


@pytest.fixture(scope="session")
def manager():
    m = SandboxManagerSync.create()
    yield m
    m.close()


@pytest.fixture
def config():
    """Connections with options of a test's own."""
    made = []

    def config(**kw):
        c = ConnectionConfigSync(**kw)
        made.append(c)
        return c

    return config


@pytest.fixture
async def amake():
    made = []

    async def make(image=IMAGE, **kw):
        kw.setdefault("timeout", LIFETIME)
        sbx = await Sandbox.create(None if "snapshot_id" in kw else image, **kw)
        made.append(sbx)
        return sbx

    yield make
    for sbx in made:
        await akill(sbx)


async def akill(sbx):
    try:
        await sbx.kill()
    except Exception as gone:
        assert getattr(gone, "status_code", None) == 404, gone
    await sbx.close()


@pytest.fixture(scope="module")
async def asandbox():
    sbx = await Sandbox.create(IMAGE, timeout=timedelta(hours=2))
    yield sbx
    await akill(sbx)


@pytest.fixture(scope="module")
async def acode(asandbox):
    return await CodeInterpreter.create(asandbox)


@pytest.fixture
async def afolder(asandbox, tag):
    path = f"/tmp/{tag}"
    await asandbox.commands.run(f"mkdir {path}")
    yield path
    await asandbox.files.delete_directories([path])


@pytest.fixture(scope="session")
async def amanager():
    m = await SandboxManager.create()
    yield m
    await m.close()


@pytest.fixture
def aconfig():
    return ConnectionConfig

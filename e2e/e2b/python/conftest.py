"""Fixtures of the suite, and its report: one JSON line for each test, with the SDK methods that the test proves."""

import os
import uuid

import httpx
import pytest
from suite import aeventually, eventually, note  # noqa: F401 tests take the first two from here

from e2b import AsyncSandbox, Sandbox
from e2b_code_interpreter import AsyncSandbox as AsyncCodeSandbox
from e2b_code_interpreter import Sandbox as CodeSandbox

LIFETIME = 1200  # seconds: what a test leaves behind is gone after it

# What a Pod refuses, which one machine does.
collect_ignore = [] if os.environ.get("E2B_SUITE_DRIVER") == "kubernetes" else ["test_refused.py"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    asynchronous = os.path.basename(str(item.fspath)).startswith("test_async")
    note(os.environ.get("E2B_SUITE_REPORT"), "python-async" if asynchronous else "python", item, call, report)


class Wire:
    """Plain HTTP to the server: what an SDK sends, where a test must see the very bytes of the answer."""

    def __init__(self):
        self.url = os.environ["E2B_API_URL"]
        self.data_url = os.environ["E2B_SANDBOX_URL"]
        self.key = os.environ["E2B_API_KEY"]
        self.client = httpx.Client(timeout=120)

    def api(self, method, path, key=None, **kw):
        headers = {"X-API-Key": self.key if key is None else key, **kw.pop("headers", {})}
        return self.client.request(method, self.url + path, headers=headers, **kw)

    def data(self, method, sandbox_id, port, path, headers=None, **kw):
        routing = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
        return self.client.request(method, self.data_url + path, headers={**routing, **(headers or {})}, **kw)


@pytest.fixture(scope="session")
def wire():
    w = Wire()
    yield w
    w.client.close()


@pytest.fixture
def tag():
    """A word that no other test uses."""
    return "t" + uuid.uuid4().hex[:12]


def _maker(cls):
    made = []

    def make(*args, **kw):
        kw.setdefault("timeout", LIFETIME)
        sbx = cls.create(*args, **kw)
        made.append(sbx)
        return sbx

    def clean():
        for sbx in made:
            sbx.kill()

    return make, clean


@pytest.fixture
def make():
    """Makes sandboxes of the template base for one test."""
    make, clean = _maker(Sandbox)
    yield make
    clean()


@pytest.fixture
def make_code():
    """Makes sandboxes of the template code-interpreter-v1 for one test."""
    make, clean = _maker(CodeSandbox)
    yield make
    clean()


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox that the tests of a module share: they leave it as they found it."""
    sbx = Sandbox.create(timeout=7200)
    yield sbx
    sbx.kill()


@pytest.fixture(scope="module")
def code():
    sbx = CodeSandbox.create(timeout=7200)
    yield sbx
    sbx.kill()


@pytest.fixture
def folder(sandbox, tag):
    """A directory of the shared sandbox for one test."""
    path = f"/home/user/{tag}"
    sandbox.files.make_dir(path)
    yield path
    sandbox.files.remove(path)


@pytest.fixture
async def amake():
    made = []

    async def make(*args, **kw):
        kw.setdefault("timeout", LIFETIME)
        sbx = await AsyncSandbox.create(*args, **kw)
        made.append(sbx)
        return sbx

    yield make
    for sbx in made:
        await sbx.kill()


@pytest.fixture(scope="module")
async def asandbox():
    sbx = await AsyncSandbox.create(timeout=7200)
    yield sbx
    await sbx.kill()


@pytest.fixture(scope="module")
async def acode():
    sbx = await AsyncCodeSandbox.create(timeout=7200)
    yield sbx
    await sbx.kill()


@pytest.fixture
async def afolder(asandbox, tag):
    path = f"/home/user/{tag}"
    await asandbox.files.make_dir(path)
    yield path
    await asandbox.files.remove(path)

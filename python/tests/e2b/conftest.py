"""Fixtures of the tests of cove.e2b: the programs in guide/, which use the old names as their users do, and what they need."""

import pathlib
import sys
import types

import pytest

from cove.e2b import CodeInterpreter

GUIDE = pathlib.Path(__file__).parent / "guide"


@pytest.fixture(autouse=True)
def cove_alone(monkeypatch):
    """The server is known by Cove's own variables only."""
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sandbox():
    with CodeInterpreter(timeout=120) as sandbox:
        yield sandbox


@pytest.fixture
def guide(monkeypatch):
    """Runs a program of guide/ with the names that it leaves to others, and gives its own; interpreter takes CodeInterpreter's place."""

    def run(name, *, interpreter=CodeInterpreter, **given):
        path = GUIDE / f"{name}.py"
        monkeypatch.setattr("cove.e2b.CodeInterpreter", interpreter)
        names = {"__name__": f"guide_{name}", **given}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return types.SimpleNamespace(**names)

    return run


@pytest.fixture
def openai(monkeypatch):
    """A module langchain_openai whose ChatOpenAI answers from a script."""

    def install(*script):
        from cove.testing import ScriptedModel

        module = types.ModuleType("langchain_openai")
        module.ChatOpenAI = lambda **_: ScriptedModel(script=list(script))
        monkeypatch.setitem(sys.modules, "langchain_openai", module)

    return install


@pytest.fixture(scope="session")
def gone():
    """Whether the server has no such sandbox any more."""

    def asked(sandbox_id):
        from e2b import NotFoundException

        try:
            CodeInterpreter.connect(sandbox_id)
        except NotFoundException:
            return True
        return False

    return asked

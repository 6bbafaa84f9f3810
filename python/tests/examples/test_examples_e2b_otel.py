"""The examples as a person runs them, with scripted models."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def run(example, *argv, **env):
    keys = {"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"}
    base = {name: value for name, value in os.environ.items() if name not in keys and not name.startswith("OTEL_")}
    base["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-B", "main.py", *argv], cwd=EXAMPLES / example, env={**base, **env}, capture_output=True, text=True, timeout=1200
    )


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs a program in this process, which has its packages imported already, and gives what it printed."""

    def run(example, *argv):
        directory = EXAMPLES / example
        for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "argv", ["main.py", *argv])
        monkeypatch.syspath_prepend(str(directory))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(directory / "main.py"), run_name="__main__")
        assert not ended.value.code
        return capsys.readouterr().out

    yield run
    for name, module in list(sys.modules.items()):
        if str(EXAMPLES) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_S0_86_S0_46_the_analysis_runs(here):
    said = here("e2b-langgraph", "analysis")
    assert re.search(r"Data:\n.*Analysis:\n[\d,]+ for tickets, [\d,]+ for fuel, [-\d,]+ left; best month \w+\n.*Plot:\nplotted\n.*1 picture", said, re.S)


def test_S0_86_S0_51_the_retries_run(here):
    assert here("e2b-langgraph", "retry").splitlines() == [
        "next_step after 2 failures: worked at try 3",
        "handle_error after 3 failures: there is no way",
    ]


def test_S0_86_S0_42_the_agents_run(here):
    assert here("e2b-langgraph", "agent", "--scripted").splitlines() == ["The sum is 338350."] * 2


def test_S0_86_a_wrong_word_is_told():
    done = run("e2b-langgraph", "nothing")
    assert (done.returncode, done.stderr.strip()) == (2, "usage: python main.py analysis | retry | agent [--scripted]")


def spans(text):
    """The spans that the console shows, by their names."""
    decoder, found, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        span, end = decoder.raw_decode(text, at)
        found.append(span)
        at = text.find("{", end)
    return found


def test_S2_52_S2_37_the_traced_agent_runs():
    done = run("otel-langgraph", "--scripted")
    assert "Answer: 0, 1, 1, 2, 3, 5, 8, 13, 21, 34" in done.stdout, done.stderr
    execution, agent = spans(done.stdout)
    assert (execution["name"], agent["name"], execution["parent_id"]) == ("sandbox.exec", "agent", agent["context"]["span_id"])


def test_S2_61_S2_62_the_traced_agent_runs_snippets_at_once():
    done = run("otel-langgraph", "--scripted", "--parallel")
    assert "Answer: 121, 144, 169" in done.stdout, done.stderr
    *executions, agent = spans(done.stdout)
    assert [(span["name"], span["parent_id"]) for span in executions] == [("sandbox.exec", agent["context"]["span_id"])] * 3


def test_S2_66_a_server_that_is_not_there_is_told():
    done = run("otel-langgraph", "--scripted", COVE_URL="http://127.0.0.1:9")
    assert done.returncode != 0 and "no server answers at http://127.0.0.1:9" in done.stderr


def test_S2_66_the_troubles_are_documented():
    text = (EXAMPLES / "otel-langgraph" / "README.md").read_text()
    for word in ("ModuleNotFoundError", "mem_mb", "COVE_URL is not set", "never calls the tool", "force_flush"):
        assert word in text

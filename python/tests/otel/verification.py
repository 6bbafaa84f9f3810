"""Five checks of an installation, from a snippet to an agent's graph; no model is asked."""

import contextlib
import io
import os

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from cove.otel import build_graph, configure_tracing, run_python, run_snippet, traced_run


class Mute(BaseChatModel):
    """A model that cannot be bound to tools and has nothing to say."""

    @property
    def _llm_type(self):
        return "mute"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return ChatResult(generations=[ChatGeneration(message=AIMessage(""))])


def a_secret_stays_here():
    os.environ.setdefault("ANTHROPIC_API_KEY", "of the caller")
    return run_snippet("from os import getenv; print(getenv('ANTHROPIC_API_KEY'))").stdout == "None\n"


def time_runs_out():
    return run_snippet("import threading; threading.Event().wait()", timeout=1.5).timed_out


def a_span_is_shown():
    tracer = configure_tracing()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        traced_run(tracer, "pass")
    return "sandbox.exec" in shown.getvalue()


def the_tool_takes_code():
    return "code" in run_python.args_schema.schema()["properties"]


def the_graph_has_its_nodes():
    return {"model", "tools"} <= build_graph(Mute()).get_graph().nodes.keys()


for check in (a_secret_stays_here, time_runs_out, a_span_is_shown, the_tool_takes_code, the_graph_has_its_nodes):
    if not check():
        raise SystemExit(f"[FAIL] {check.__name__}")
    print("[PASS]", check.__name__.replace("_", " "))
print("5 of 5 checks passed")

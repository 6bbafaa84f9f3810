"""What schemathesis must know of the server under test. Each exception has its reason."""

import json
import os

import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

SANDBOX = os.environ["COVE_TEST_SANDBOX"]
SESSION = os.environ["COVE_TEST_SESSION"]
KEYS = os.environ["COVE_TEST_KEYS"].split(",")

# They end what the other operations need.
ENDS = {"killSandbox", "removeSession", "stopSession", "restoreSession", "pauseSandbox", "resumeSandbox", "setTimeout"}
# Of a sandbox that lives it answers until its caller leaves: only refusals are judged here.
ENDLESS = {"watchFiles"}
# Enough for a host that runs other tests too; what a server allows beyond is in no document.
LIMITS = {"cpus": 2, "memory_bytes": 1 << 30, "pids": 512, "disk_bytes": 1 << 30, "open_files": 4096}
LEAST = {"pids": 32, "memory_bytes": 256 << 20}  # with less a sandbox starts, and what it runs may not


def wrong(case, where):
    """Tells whether this part of a case is meant to be refused: it stays as it is."""
    component = case.meta.components.get(where) if case.meta else None
    return component is not None and component.mode == GenerationMode.NEGATIVE


def known(case):
    """Half of the cases are about a sandbox or a session that lives: the others would see nothing but 404."""
    name = case.operation.definition.raw.get("operationId")
    parameters = case.path_parameters
    if not isinstance(parameters, dict) or wrong(case, ParameterLocation.PATH):
        return
    if name in ENDLESS:
        parameters["id"] = "sbunknown"
    if name in ENDS | ENDLESS:
        return
    text = json.dumps([str(parameters), str(case.body), str(case.query)])
    if sum(text.encode()) % 2:
        return
    if "id" in parameters and "/sandboxes/" in case.path:
        parameters["id"] = SANDBOX
    if "key" in parameters and "/sessions/" in case.path:
        parameters["key"] = SESSION


def within(body):
    """Keeps to the bounds of the operator and of the host, which are in no document."""
    limits = body.get("limits")
    if isinstance(limits, dict):
        for name, most in LIMITS.items():
            value = limits.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                limits[name] = min(max(value, LEAST.get(name, 0)), most)
    if isinstance(body.get("count"), (int, float)) and not isinstance(body["count"], bool):
        body["count"] = min(body["count"], 2)
    if isinstance(body.get("mounts"), list):
        body["mounts"] = body["mounts"][:1]  # two must not lie in each other


def harms(case):
    """Tells whether a case ends what the suite needs: the schema's own examples are ids that earlier answers told."""
    name = case.operation.definition.raw.get("operationId")
    parameters = case.path_parameters if isinstance(case.path_parameters, dict) else {}
    if name == "revokeKey":
        return parameters.get("key") in KEYS
    return name in ENDS and (parameters.get("id") == SANDBOX or parameters.get("key") == SESSION)


@schemathesis.hook
def filter_case(context, case):
    return not harms(case)


@schemathesis.hook
def before_call(context, case, kwargs):
    known(case)
    if harms(case):
        case.path_parameters["key" if "key" in case.path_parameters else "id"] = "unknown"
    if isinstance(case.query, dict) and not wrong(case, ParameterLocation.QUERY):
        if "follow" in case.query:
            case.query["follow"] = "false"  # such an answer goes on until its reader leaves
    if isinstance(case.body, dict) and not wrong(case, ParameterLocation.BODY):
        within(case.body)


# A stream without a line has nothing to judge. This line is one of every stream.
NO_LINE = b'{"type": "fault", "seq": 0, "timestamp": "2026-01-01T00:00:00Z", "event": "session_started"}'


@schemathesis.deserializer("application/x-ndjson")
def lines(context, response):
    """The document describes one line of a stream: the first stands for all."""
    return json.loads(next(iter(response.content.splitlines()), NO_LINE))

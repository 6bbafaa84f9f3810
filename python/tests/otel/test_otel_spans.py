"""Spans of snippets, in an exporter that keeps them."""

import io
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import cove.otel
from cove.otel import ExecResult, atraced_run, configure_tracing, force_flush, traced_run

HERE = pathlib.Path(__file__).parent
ATTRIBUTES = {
    "sandbox.code_length": int,
    "sandbox.timeout_s": float,
    "sandbox.mem_limit_mb": int,
    "sandbox.exit_code": int,
    "sandbox.timed_out": bool,
    "sandbox.stdout_bytes": int,
    "sandbox.stderr_preview": str,
}


@pytest.fixture
def kept():
    """A tracer and the spans it finished."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    tracer.finished = exporter.get_finished_spans
    yield tracer
    provider.shutdown()


def answers(**fields):
    """A runner that says this at once."""
    return lambda code, **_: ExecResult(**{"exit_code": 0, "stdout": "", "stderr": "", "timed_out": False, **fields})


def test_S2_24_S2_25_S2_26_S2_27_S2_28_S2_29_S2_30_S2_31_S2_34_one_span_tells_all_of_a_run(kept):
    traced_run(kept, "print('hé')", timeout=7, mem_mb=256)
    (span,) = kept.finished()
    assert span.name == "sandbox.exec"
    assert dict(span.attributes) == {
        "sandbox.code_length": 11,
        "sandbox.timeout_s": 7.0,
        "sandbox.mem_limit_mb": 256,
        "sandbox.exit_code": 0,
        "sandbox.timed_out": False,
        "sandbox.stdout_bytes": 4,
        "sandbox.stderr_preview": "",
    }
    assert (span.status.status_code, span.status.description) == (StatusCode.OK, None)


def test_S2_28_S2_31_S2_33_a_failure_is_an_error(kept):
    traced_run(kept, "import sys; sys.stderr.write('é' * 1000); sys.exit(3)")
    (span,) = kept.finished()
    assert (span.attributes["sandbox.exit_code"], span.attributes["sandbox.stderr_preview"]) == (3, "é" * 200)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "é" * 120)


def test_S2_29_S2_33_a_timeout_is_an_error(kept):
    traced_run(kept, "import time; time.sleep(3600)", timeout=1)
    (span,) = kept.finished()
    assert (span.attributes["sandbox.exit_code"], span.attributes["sandbox.timed_out"]) == (-1, True)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "timed out after 1 seconds")


def test_S2_32_what_was_asked_is_told_though_the_run_broke(kept):
    def broken(code, **_):
        raise ConnectionError("no server")

    with pytest.raises(ConnectionError):
        traced_run(kept, "print(1)", runner=broken)
    (span,) = kept.finished()
    assert dict(span.attributes) == {"sandbox.code_length": 8, "sandbox.timeout_s": 10.0, "sandbox.mem_limit_mb": 128}
    assert span.status.status_code is StatusCode.ERROR and span.events[0].name == "exception"


def test_S2_35_a_spans_time_is_the_runs(kept):
    """It has the second that the code takes, and nothing from before or after the call."""
    before = time.time_ns()
    traced_run(kept, "import time; time.sleep(1)")
    after = time.time_ns()
    (span,) = kept.finished()
    assert before <= span.start_time < span.start_time + 1_000_000_000 <= span.end_time <= after


def test_S2_36_the_span_is_current_while_the_code_runs(kept):
    def nested(code, **_):
        with kept.start_as_current_span("inner"):
            return answers()(code)

    with kept.start_as_current_span("outer"):
        traced_run(kept, "1", runner=nested)
    inner, run, outer = kept.finished()
    assert (inner.parent.span_id, run.parent.span_id) == (run.context.span_id, outer.context.span_id)


def test_S2_36_a_program_in_a_sandbox_can_go_on_with_the_trace(kept):
    """A command of a sandbox is told its span; a snippet's environment is what its caller gave and nothing else."""
    from cove import Cove

    with Cove().create() as sandbox:

        def command(code, **_):
            out = sandbox.exec(["python3", "-c", code])
            return ExecResult(out.exit_code, out.stdout, out.stderr, False)

        result = traced_run(kept, "import os; print(os.environ['TRACEPARENT'])", runner=command)
    (span,) = kept.finished()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split("-")[1] == f"{span.context.trace_id:032x}"


def exported(trace_id):
    """The spans of a trace that the server sent to its collector, by name."""
    import base64

    import httpx
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    requests = [ExportTraceServiceRequest.FromString(base64.b64decode(raw)) for raw in httpx.get(os.environ["COVE_TEST_SPANS"] + "/requests").json()]
    spans = [span for request in requests for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    return {span.name: span for span in spans if span.trace_id.hex() == f"{trace_id:032x}"}


def test_S2_36_S2_62_the_servers_span_of_the_run_is_below_the_callers(kept):
    traced_run(kept, "print(1)")
    (span,) = kept.finished()
    deadline = time.monotonic() + 120
    while "sandbox.exec" not in (there := exported(span.context.trace_id)) or "POST /cove/v1/snippets" not in there:
        assert time.monotonic() < deadline, there
        time.sleep(0.1)
    ids = {each.span_id: each for each in there.values()}
    above = there["sandbox.exec"]
    while above.parent_span_id in ids:
        above = ids[above.parent_span_id]
    assert above.parent_span_id.hex() == f"{span.context.span_id:016x}"


def test_S2_63_no_code_and_no_output_is_in_a_span_unless_asked_for(kept):
    code = "print('sesame')"
    traced_run(kept, code)
    traced_run(kept, code, capture_code=True)
    quiet, told = kept.finished()
    assert "sesame" not in quiet.to_json()
    assert told.attributes["sandbox.code"] == code


def test_S2_65_names_and_types_are_always_the_same(kept):
    traced_run(kept, "1", timeout=3, runner=answers())
    traced_run(kept, "1", runner=answers(exit_code=-1, stderr="x", timed_out=True))
    for span in kept.finished():
        assert {name: type(value) for name, value in span.attributes.items()} == ATTRIBUTES


def test_S2_57_another_runtime_has_the_same_span(kept):
    """The command API of a sandbox in the place of run_snippet."""
    from cove import Cove

    with Cove().create() as sandbox:

        def command(code, timeout, **_):
            out = sandbox.exec(["python3", "-c", code], timeout=timeout)
            return ExecResult(out.exit_code, out.stdout, out.stderr, out.outcome == "timeout")

        assert traced_run(kept, "print(6 * 7)", runner=command).stdout == "42\n"
    (span,) = kept.finished()
    assert {name: type(value) for name, value in span.attributes.items()} == ATTRIBUTES


async def test_S2_24_the_same_for_coroutines(kept):
    async def runner(code, **_):
        return answers(stdout="ok")(code)

    assert (await atraced_run(kept, "1", runner=runner)).stdout == "ok"
    assert [span.name for span in kept.finished()] == ["sandbox.exec"]


def test_S2_37_S2_38_S2_39_spans_are_shown_on_the_present_stdout(monkeypatch):
    tracer = configure_tracing("of-this-test")
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    traced_run(tracer, "1", runner=answers())
    shown = json.loads(captured.getvalue())
    assert (shown["name"], shown["resource"]["attributes"]["service.name"]) == ("sandbox.exec", "of-this-test")


def test_S2_39_the_standard_name_of_a_service_wins_over_the_default_alone(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "by-the-variable")
    exporter = InMemorySpanExporter()
    traced_run(configure_tracing(exporter=exporter, batch=False), "1", runner=answers())
    traced_run(configure_tracing("by-the-program", exporter=exporter, batch=False), "1", runner=answers())
    assert [span.resource.attributes["service.name"] for span in exporter.get_finished_spans()] == ["by-the-variable", "by-the-program"]


def test_S2_37_a_second_tracer_works_beside_the_first():
    first, second = InMemorySpanExporter(), InMemorySpanExporter()
    tracers = [configure_tracing(name, exporter=exporter, batch=False) for name, exporter in (("a", first), ("b", second))]
    for tracer in tracers:
        traced_run(tracer, "1", runner=answers())
    assert [span.resource.attributes["service.name"] for span in first.get_finished_spans() + second.get_finished_spans()] == ["a", "b"]


def test_S2_37_the_first_tracers_provider_is_the_processs_own():
    program = (
        "from opentelemetry import trace\nfrom cove.otel import configure_tracing\n"
        "for name in ('first', 'second'): configure_tracing(name)\n"
        "print(trace.get_tracer_provider().resource.attributes['service.name'])"
    )
    done = run("-c", program)
    assert (done.stdout, done.stderr) == ("first\n", "")


def test_S2_42_a_flush_loses_no_span():
    exporter = InMemorySpanExporter()
    tracer = configure_tracing("batched", exporter=exporter)
    for _ in range(20):
        traced_run(tracer, "1", runner=answers())
    assert force_flush() and len(exporter.get_finished_spans()) == 20


def test_S2_43_simple_spans_appear_as_they_close():
    exporter = InMemorySpanExporter()
    tracer = configure_tracing("simple", exporter=exporter, batch=False)
    for n in range(3):
        traced_run(tracer, "#" * n, runner=answers())
        assert [span.attributes["sandbox.code_length"] for span in exporter.get_finished_spans()] == list(range(n + 1))


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, "opentelemetry.sdk.trace.export"),
    ],
)
def test_S2_41_the_standard_variables_choose_the_exporter(monkeypatch, variables, kind):
    from cove.otel import _tracing

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    exporter = _tracing._exporter()
    assert type(exporter).__module__.startswith(kind)
    exporter.shutdown()


def test_S2_41_a_word_that_nobody_knows_is_told(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ValueError, match="zipkin"):
        configure_tracing()


def run(*argv, **env):
    base = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    base["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run([sys.executable, "-B", *argv], env={**base, **env}, capture_output=True, text=True, timeout=600)


def test_S2_40_S2_41_a_collector_receives_the_spans(collector):
    """Only variables say where; the program is the same for gRPC and HTTP."""
    program = "from cove.otel import configure_tracing, traced_run\nprint(traced_run(configure_tracing('svc'), 'print(1)').stdout)"
    for protocol in ("grpc", "http/protobuf"):
        done = run("-c", program, OTEL_EXPORTER_OTLP_ENDPOINT=collector.address(protocol), OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        assert done.stdout == "1\n\n", done.stderr
    for request in collector.received:
        (spans,) = request.resource_spans
        service = {each.key: each.value.string_value for each in spans.resource.attributes}["service.name"]
        (span,) = spans.scope_spans[0].spans
        assert (service, span.name, {each.key for each in span.attributes}) == ("svc", "sandbox.exec", set(ATTRIBUTES))
    assert len(collector.received) == 2


def test_S2_64_without_a_provider_nothing_is_missing():
    program = "import sys\nsys.modules['opentelemetry.sdk'] = None\nfrom cove.otel import run_python\nprint(run_python.invoke({'code': 'print(6 * 7)'}))"
    done = run("-c", program)
    assert (done.stdout, done.returncode) == ("42\n\n", 0), done.stderr


def test_S2_54_S2_38_S2_50_the_verification_program_passes():
    done = run(str(HERE / "verification.py"), ANTHROPIC_API_KEY="sk-of-the-caller")
    passed = [line for line in done.stdout.splitlines() if line]
    assert passed == [
        "[PASS] a secret stays here",
        "[PASS] time runs out",
        "[PASS] a span is shown",
        "[PASS] the tool takes code",
        "[PASS] the graph has its nodes",
        "5 of 5 checks passed",
    ], done.stderr


@pytest.mark.parametrize(("program", "last"), [("smoke", "snippets run: 1024, no PYTHONPATH"), ("emission", "a span was shown; the snippet said ahoy")])
def test_S2_5_S2_7_S2_38_the_small_checks_pass(program, last):
    done = run(str(HERE / f"{program}.py"))
    assert done.stdout.splitlines()[-1:] == [last], done.stderr

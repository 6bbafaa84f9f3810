"""Managers, retries and logs: around sandboxes rather than in them."""

import logging
import re
import threading
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from cove.e2b import CodeInterpreter, Lines, SandboxManager, execute_with_logging, safe_execute


class Clock:
    def __init__(self):
        self.time = datetime(2026, 1, 1)

    def __call__(self):
        return self.time

    def pass_(self, minutes):
        self.time += timedelta(minutes=minutes)


class Double:
    """A sandbox of a test: what it does is written down."""

    def __init__(self, *answers):
        self.answers, self.closed = list(answers), 0
        self.notebook = SimpleNamespace(exec_cell=self.exec_cell)

    def exec_cell(self, code):
        said = self.answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def close(self):
        self.closed += 1
        return self.closed == 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def execution(stdout="", error=None):
    return SimpleNamespace(logs=SimpleNamespace(stdout=Lines([stdout]), stderr=Lines()), error=error, results=[])


def test_S0_74_a_session_keeps_its_sandbox_for_half_an_hour():
    clock = Clock()
    manager = SandboxManager(create=Double, now=clock)
    first = manager.get_or_create("a")
    clock.pass_(30)
    assert manager.get_or_create("a") is first and first.closed == 0
    clock.pass_(0.1)
    second = manager.get_or_create("a")
    assert second is not first and (first.closed, second.closed) == (1, 0)
    clock.pass_(30)
    assert manager.get_or_create("a") is second  # its own age, not the first one's


def test_S0_74_sessions_have_sandboxes_of_their_own_and_all_are_cleaned_up():
    manager = SandboxManager(max_age_minutes=1, create=Double, now=Clock())
    made = [manager.get_or_create(session) for session in "aba"]
    assert made[0] is made[2] is not made[1]
    manager.cleanup_all()
    assert [each.closed for each in made[:2]] == [1, 1] and manager.sandboxes == {}
    assert manager.get_or_create("a") is not made[0]


def test_S0_74_cleaning_up_goes_on_after_a_failure():
    manager = SandboxManager(create=Double, now=Clock())
    bad, good = manager.get_or_create("bad"), manager.get_or_create("good")
    bad.close = lambda: (_ for _ in ()).throw(ConnectionError("no server"))
    with pytest.raises(ConnectionError):
        manager.cleanup_all()
    assert good.closed == 1 and manager.sandboxes == {}


def test_S0_74_a_session_that_is_asked_for_by_many_has_one_sandbox():
    made = []
    manager = SandboxManager(create=lambda: made.append(Double()) or made[-1])
    threads = [threading.Thread(target=manager.get_or_create, args=("a",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_S0_74_S0_75_a_replaced_sandbox_is_clean_and_the_old_one_gone(gone):
    clock = Clock()
    with SandboxManager(now=clock) as manager:
        first = manager.get_or_create("a")
        first.notebook.exec_cell("x = 1; open('/tmp/x', 'w').write('1')")
        info = first.get_info()
        assert (info.end_at - info.started_at).total_seconds() > 30 * 60  # the server keeps it as long as the manager
        clock.pass_(31)
        second = manager.get_or_create("a")
        clean = second.notebook.exec_cell("import os; 'x' in globals(), os.path.exists('/tmp/x')").results[0].text
        assert clean == "(False, False)" and gone(first.id)
    assert gone(second.id)


def test_S0_74_the_guides_manager(guide, gone):
    manager = guide("manager").Manager(max_age_minutes=30)
    first = manager.get_or_create("a")
    assert manager.get_or_create("a") is first
    manager.max_age = timedelta(0)
    second = manager.get_or_create("a")
    assert second is not first and gone(first.id)
    manager.cleanup_all()
    assert gone(second.id)


def test_S0_77_a_success_is_what_was_printed():
    assert safe_execute("print('ok')") == "ok\n"


def test_S0_77_each_attempt_has_a_fresh_sandbox():
    made = [Double(execution(error="boom")), Double(ConnectionError("lost")), Double(execution("third\n"))]
    left = list(made)
    assert safe_execute("x", create=lambda: left.pop(0)) == "third\n"
    assert [each.closed for each in made] == [1, 1, 1]


def test_S0_77_code_that_always_fails_is_none():
    made = [Double(execution(error="boom")) for _ in range(3)]
    left = list(made)
    assert safe_execute("x", create=lambda: left.pop(0)) is None and left == []


def test_S0_77_a_transport_error_of_the_last_attempt_is_raised():
    left = [Double(execution(error="boom")), Double(ConnectionError("lost"))]
    with pytest.raises(ConnectionError):
        safe_execute("x", retries=2, create=lambda: left.pop(0))


def test_S0_77_no_attempt_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        safe_execute("x", retries=0)


def test_S0_77_the_guides_retries(guide, capsys):
    program = guide("safe_execute")
    assert program.safe_execute("print('once')") == "once\n"
    assert program.safe_execute("1/0", retries=2) is None
    assert capsys.readouterr().out.splitlines() == ["ZeroDivisionError, 1 tries left", "ZeroDivisionError, 0 tries left"]


def test_S0_78_a_run_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="cove.e2b")
    execution = execute_with_logging("secret = 'sesame'; 1/0", {"task": "sums", "n": 3})
    said = [record.getMessage() for record in caplog.records]
    assert execution.error.name == "ZeroDivisionError"
    assert said[0] == "a run wants a sandbox: {'task': 'sums', 'n': '3'}"
    assert re.fullmatch(r"the run has sandbox \S+", said[1])
    assert re.fullmatch(r"the run took \d+\.\d{3} seconds", said[2])
    assert said[3].startswith("the run failed: ZeroDivisionError")
    assert not any("sesame" in message for message in said[:3])


def test_S0_78_the_guides_logging(guide, caplog):
    caplog.set_level(logging.INFO, logger="usage")
    assert guide("logging_").noted("print(1); 1/0", task="sums").logs.stdout == "1\n"
    asked, took, failed = (record.getMessage() for record in caplog.records if record.name == "usage")
    assert (asked, failed) == ("asked for: {'task': 'sums'}", "it failed: ZeroDivisionError")
    assert re.fullmatch(r"\S+ took \d+\.\d\d seconds", took)


def test_S0_79_the_context_is_metadata_that_lists_filter_by():
    seen = []

    class Watched(CodeInterpreter):
        def run_code(self, *args, **kw):
            from e2b.sandbox.sandbox_api import SandboxQuery

            listed = CodeInterpreter.list(query=SandboxQuery(metadata={"task": "filtered by test"})).next_items()
            seen.append(([each.sandbox_id for each in listed] == [self.id], listed[0].metadata))
            return super().run_code(*args, **kw)

    execute_with_logging("1", {"task": "filtered by test"}, create=Watched)
    assert seen == [(True, {"task": "filtered by test"})]

"""Claims about a kernel that was started by exec. Both shells make them; the rich ones are IPython's alone."""

import base64
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer import Died, Started  # noqa: E402

DATA, CHART = "application/vnd.cove.data+json", "application/vnd.cove.chart+json"
SHELL = os.environ.get("COVE_TEST_SHELL", "plain")
PYTHON = os.environ.get("COVE_TEST_PYTHON") or sys.executable


def start(**options):
    return Started(PYTHON, plain=SHELL == "plain", **options)


def kinds(events):
    return [e["type"] for e in events]


def results(events):
    return [e["result"] for e in events if e["type"] == "result"]


def errors(events):
    return [e["error"] for e in events if e["type"] == "error"]


def outcome(events):
    return events[-1]["end"]["outcome"]


class Claims(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kernel = start()

    @classmethod
    def tearDownClass(cls):
        cls.kernel.close()

    def own(self, **options):
        kernel = start(**options)
        self.addCleanup(kernel.close)
        return kernel

    def fails(self, code, name, kernel=None, **more):
        events = (kernel or self.kernel).run(code, **more)
        self.assertEqual(outcome(events), "interrupted" if name == "KeyboardInterrupt" else "error", events)
        self.assertEqual([e["name"] for e in errors(events)], [name])
        return errors(events)[0]


class Protocol(Claims):
    def test_a_kernel_says_what_it_is_when_ready(self):
        ready = self.kernel.ready
        self.assertEqual((ready["type"], ready["pid"]), ("ready", self.kernel.process.pid))
        if SHELL == "plain":
            self.assertEqual(ready["message"], "plain")
        else:
            self.assertRegex(ready["message"], r"^ipython \d+\.")

    def test_a_cell_is_started_result_end(self):
        kernel = self.own()
        events = kernel.run("1+1")
        usage = events[-1]["end"].pop("usage")
        self.assertEqual(events, [
            {"type": "started", "count": 1},
            {"type": "result", "result": {"data": {"text/plain": "2"}, "main": True}},
            {"type": "end", "end": {"outcome": "ok"}},
        ])
        self.assertGreaterEqual(usage["cpu_ms"], 0)
        self.assertGreater(usage["peak_bytes"], 1 << 20)

    def test_the_count_grows_with_each_cell_and_not_with_silent_ones(self):
        kernel = self.own()
        counts = [kernel.run(c, silent=s)[0]["count"] for c, s in (("1", False), ("2", True), ("1/0", False), ("3", False))]
        self.assertEqual(counts, [1, 2, 2, 3])

    def test_a_silent_cell_shows_no_value_but_has_effects(self):
        self.assertEqual(kinds(self.kernel.run("quiet = 41\nquiet", silent=True)), ["started", "end"])
        self.assertEqual(self.kernel.value("quiet + 1"), "42")

    def test_state_stays_between_cells(self):
        self.kernel.run("kept = [1]")
        self.kernel.run("kept.append(2)")
        self.assertEqual(self.kernel.value("kept"), "[1, 2]")

    def test_a_semicolon_hides_the_value(self):
        self.assertEqual(results(self.kernel.run("5;")), [])
        self.assertEqual(results(self.kernel.run("5;  # why")), [])
        self.assertEqual(self.kernel.value("'a;'"), "'a;'")

    def test_the_value_of_a_cell_is_its_last_expression(self):
        for code, value in (
            ("a = 1\n\n\na + 1", "2"), ("a = 1\r\na", "1"), ("if True:\n    a = 3\na\n\n", "3"), ("a = 4\na # why", "4"),
            ("def f():\n    return 5\n\nf()  \n", "5"), ("a = (1,\n2)\na[\n1]", "2"), ('"""x\ny"""', "'x\\ny'"), ("a = 6; a", "6"),
            ("a = 7 \\\n+ 1\na", "8"), ("for a in range(3):\n    pass\nelse: a = 9\na", "9"), ('a = """\n1"""\na', "'\\n1'"),
            ("# first\na = 10\na", "10"), ("\n\n11", "11"), ("a = 12 # \\\na", "12"), ('f"""{\n13}"""', "'13'"),
        ):
            self.assertEqual(self.kernel.value(code), value, code)
        for code in ("a = 1\n# a", "a = 1\na = 2", "a = 1\n  # a", 'x = """\n1\n"""', "if True:\n    1", "def f():\n    1\n    2", "a = (\n1)",
                     "a = 7 \\\n+ 1"):
            self.assertEqual(results(self.kernel.run(code)), [], code)

    def test_a_line_that_fails_is_told_by_its_number(self):
        text = "\n".join(self.fails("a = 1\n\n\na / 0\n", "ZeroDivisionError")["traceback"])
        self.assertRegex(text, r"line 4|---?> 4 a / 0")
        text = "\n".join(self.fails("a = 1\na / 0\na", "ZeroDivisionError")["traceback"])
        self.assertRegex(text, r"line 2|---?> 2 a / 0")

    def test_what_follows_the_value_of_a_cell_comes_after_it(self):
        kernel = self.own()
        kernel.run("import sys, time\nclass Last:\n    def __repr__(self):\n        return 'last'\n")
        self.assertEqual(kinds(kernel.run("Last()")), ["started", "result", "end"])
        kernel.run("def hook(value, show=sys.displayhook):\n    show(value)\n    raise ValueError('after it')\nsys.displayhook = hook")
        self.assertEqual(kinds(kernel.run("Last()")), ["started", "result", "error", "end"])
        kernel.run("def hook(value, show=hook.__defaults__[0]):\n    show(value)\n    exit()\nsys.displayhook = hook")
        kernel.send({"code": "Last()"})
        self.assertEqual(kernel.event()["type"], "started")
        self.assertEqual(kernel.event()["result"]["data"]["text/plain"], "last")

    def test_an_empty_cell_is_a_cell(self):
        self.assertEqual(kinds(self.kernel.run("")), ["started", "end"])
        self.assertEqual(kinds(self.kernel.run(" \n ")), ["started", "end"])
        self.assertEqual(kinds(self.kernel.run("# nothing")), ["started", "end"])

    def test_the_values_of_earlier_cells_have_names(self):
        kernel = self.own()
        kernel.run("11")
        self.assertEqual(kernel.value("_ + 1"), "12")
        self.assertEqual(kernel.value("Out[1], In[1]"), "(11, '11')")

    def test_the_user_module_is_main(self):
        self.assertEqual(self.kernel.value("class C: pass\nimport pickle, sys\n"
                                           "pickle.loads(pickle.dumps(C())).__class__ is C, __name__"), "(True, '__main__')")

    def test_what_cannot_be_read_is_answered(self):
        kernel = self.own()
        for payload in (b"{", b"[]", b"null", b"\xff\xfe", b'{"code": 5}', b'{"code":"1","env":{"A":1}}', b'{"code":"1","cwd":3}'):
            kernel.send(payload)
            self.assertEqual(outcome(kernel.finish()), "error", payload)
        self.assertEqual(kernel.value("1"), "1")

    def test_frames_of_other_kinds_are_ignored(self):
        kernel = self.own()
        kernel.send(b"{}", kind=8)
        kernel.send(b"", kind=7)
        self.assertEqual(kernel.value("1"), "1")

    def test_a_bad_header_ends_the_kernel(self):
        for header in (b"\0" * 8, b"\xff" * 8, b"\x01\x01\0\0\0\0\0\0", struct.pack(">B3sI", 1, b"\0\0\0", (16 << 20) + 1)):
            kernel = self.own()
            kernel.sock.sendall(header)
            self.assertEqual(kernel.wait(), 76)
            self.assertIn("kernel: ", kernel.output("err", until="\n"))

    def test_a_frame_that_stops_half_way_ends_the_kernel(self):
        kernel = self.own()
        kernel.sock.sendall(struct.pack(">B3sI", 1, b"\0\0\0", 100) + b"{")
        kernel.sock.shutdown(1)
        self.assertEqual(kernel.wait(), 76)

    def test_random_bytes_never_hang_or_crash_it(self):
        for seed in range(6):
            kernel = self.own()
            noise = random.Random(seed).randbytes(4096) if seed % 2 else b"".join(
                struct.pack(">B3sI", random.Random(seed + i).randrange(2, 10), b"\0\0\0", 3) + b"abc" for i in range(50)) + b"\xff"
            try:
                kernel.sock.sendall(noise)
                kernel.sock.shutdown(1)
            except OSError:
                pass
            self.assertEqual(kernel.wait(), 76)

    def test_a_closed_socket_ends_the_kernel(self):
        kernel = self.own()
        kernel.sock.shutdown(1)
        self.assertEqual(kernel.wait(), 0)


class Text(Claims):
    def test_output_goes_to_the_descriptors_and_is_flushed_before_each_event(self):
        kernel = self.own()
        kernel.run("import sys\nprint('one'); sys.stdout.write('two'); print('err', file=sys.stderr)")
        self.assertEqual(kernel.output(until="two"), "one\ntwo")
        self.assertEqual(kernel.output("err", until="err"), "err\n")

    def test_text_that_is_not_unicode_never_breaks_print(self):
        kernel = self.own()
        events = kernel.run("print('\\ud800', 'ä', '\\udcff')")
        self.assertEqual(outcome(events), "ok")
        self.assertEqual(kernel.output(until="\n"), "\\ud800 ä \\udcff\n")

    def test_a_lone_surrogate_in_a_value_is_valid_json(self):
        self.assertEqual(json.loads(json.dumps(results(self.kernel.run("chr(0xd800)"))))[0]["data"]["text/plain"], "'\\ud800'")
        events = self.kernel.run("class S:\n    def __repr__(self): return chr(0xdfff)\nS()")
        self.assertEqual(results(events)[0]["data"]["text/plain"], "\udfff")

    def test_source_that_is_not_utf8_runs_or_fails_but_is_answered(self):
        self.kernel.send(b'{"code":"x = \'\xff\'; len(x)"}')
        self.assertEqual(outcome(self.kernel.finish()), "ok")
        self.kernel.send(b'{"code":"\\ud800"}')
        self.assertEqual(outcome(self.kernel.finish()), "error")
        self.kernel.send(b'{"code":"a = 1\\u0000"}')
        self.assertEqual(outcome(self.kernel.finish()), "error")
        self.assertEqual(self.kernel.value("1"), "1")

    def test_a_very_big_value_becomes_a_note(self):
        for code in ("'x' * (9 << 20)", "display('x' * (9 << 20))"):
            data = results(self.kernel.run(code))[0]["data"]
            self.assertEqual(list(data), ["text/plain"])
            self.assertRegex(data["text/plain"], "left out: [0-9]+ bytes, over the limit of 8388608")

    def test_a_very_big_error_is_shortened(self):
        error = self.fails("raise ValueError('x' * (9 << 20))", "ValueError")
        self.assertLess(len(json.dumps(error)), 1 << 20)

    def test_sources_of_output_other_than_python_are_heard(self):
        kernel = self.own()
        kernel.run("import os, subprocess\nprint('a')\nos.system('echo b')\nprint('c')\nsubprocess.run(['echo', 'd'])\nos.write(1, b'e\\n')")
        self.assertEqual(kernel.output(until="e\n"), "a\nb\nc\nd\ne\n")

    def test_c_code_is_heard(self):
        kernel = self.own()
        kernel.run("import ctypes\nctypes.CDLL(None).printf(b'from C')")
        self.assertEqual(kernel.output(until="C"), "from C")

    def test_commands_with_an_exclamation_mark_are_heard_live(self):
        kernel = self.own()
        kernel.send({"code": "print('before')\n!echo first; sleep 3600; echo second"})
        self.assertEqual(kernel.output(until="first\n"), "before\nfirst\n")  # or it fails after a minute
        kernel.interrupt()
        self.assertEqual(outcome(kernel.finish()), "interrupted")

    def test_a_bash_cell_is_heard_and_fails_by_its_status(self):
        kernel = self.own()
        self.assertEqual(outcome(kernel.run("%%bash\necho one\necho two >&2")), "ok")
        self.assertEqual(kernel.output(until="one\n"), "one\n")
        self.assertEqual(kernel.output("err", until="two\n"), "two\n")
        self.fails("%%bash\nexit 3", "CalledProcessError", kernel)

    def test_pip_lines_run_pip(self):
        kernel = self.own()
        for code in ("%pip --version", "pip --version", "x = 1\npip list --help"):
            self.assertEqual(outcome(kernel.run(code)), "ok", code)
        self.assertRegex(kernel.output(until="Usage"), r"(?s)pip \d+.*pip \d+.*Usage")


class Errors(Claims):
    def test_an_exception_has_name_value_and_a_traceback_of_the_users_lines_only(self):
        error = self.fails("def f():\n    return 1/0\nf()", "ZeroDivisionError")
        self.assertEqual(error["value"], "division by zero")
        text = "\n".join(error["traceback"])
        self.assertIn("return 1/0", text)
        self.assertIn("f()", text)
        self.assertEqual(error["traceback"][-1], "ZeroDivisionError: division by zero")
        for strange in ("kernel.py", "run_nodes", "\x1b"):
            self.assertNotIn(strange, text)

    def test_a_syntax_error_shows_the_line_and_nothing_ran(self):
        error = self.fails("ran = 1\na b c\n", "SyntaxError")
        text = "\n".join(error["traceback"])
        self.assertIn("a b c", text)
        self.assertNotIn("kernel.py", text)
        self.fails("ran", "NameError")
        for code in ("x = (", "return 5", "if 1:\npass", "'abc", "break"):
            self.assertIn(self.kernel.run(code)[-2]["error"]["name"], ("SyntaxError", "IndentationError"), code)

    def test_errors_that_led_to_errors_are_told_without_our_frames(self):
        error = self.fails("try:\n    1/0\nexcept Exception as e:\n    raise KeyError('k') from e", "KeyError")
        text = "\n".join(error["traceback"])
        self.assertIn("ZeroDivisionError", text)
        self.assertNotIn("kernel.py", text)
        self.assertEqual(error["value"], "'k'")

    def test_exceptions_that_cannot_be_printed_are_told(self):
        self.fails("class E(Exception):\n    def __str__(self): raise RuntimeError('no')\n    __repr__ = __str__\nraise E()", "E")
        self.fails("class B(BaseException): pass\nraise B()", "B")
        self.fails("def r(): r()\nr()", "RecursionError")

    def test_an_exception_group_is_told(self):
        if self.kernel.value("import sys; sys.version_info >= (3, 11)") == "True":
            error = self.fails("raise ExceptionGroup('g', [ValueError('inner')])", "ExceptionGroup")
            self.assertIn("inner", "\n".join(error["traceback"]))

    def test_a_value_whose_repr_raises_is_an_error_not_a_crash(self):
        self.kernel.run("class R:\n    def __repr__(self): raise ValueError('bad repr')")
        events = self.kernel.run("R()")
        self.assertIn("ValueError", [e["name"] for e in errors(events)] + [self.kernel.output("err")[-2000:] and "ValueError"])
        self.assertEqual(self.kernel.value("1"), "1")

    def test_input_says_that_there_is_nobody(self):
        error = self.fails("input('name?')", "RuntimeError")
        self.assertIn("no standard input", error["value"])
        self.assertNotIn("kernel.py", "\n".join(error["traceback"]))
        self.assertEqual(self.kernel.value("import sys; sys.stdin.read()"), "''")

    def test_lists_and_dicts_are_json_when_that_is_wanted(self):
        for code, value in (("[1, {'a': None}]", [1, {"a": None}]), ("{'x': [True, 'é'], 3: 0.5}", {"x": [True, "é"], "3": 0.5}),
                            ("[float('nan'), 1]", [None, 1]), ("[]", [])):
            data = results(self.kernel.run(code, rich=True))[0]["data"]
            self.assertEqual(data["application/json"], value)
            self.assertEqual(results(self.kernel.run(code))[0]["data"].keys(), {"text/plain"})
        for code in ("[object()]", "a = []; a.append(a); a", "['x' * 2000000]", "(1, 2)", "{1, 2}", "'text'", "7"):
            self.assertEqual(results(self.kernel.run(code, rich=True))[0]["data"].keys(), {"text/plain"}, code)

    def test_await_works_at_top_level(self):
        self.assertEqual(self.kernel.value("import asyncio\nawait asyncio.sleep(0.001)\nawait asyncio.sleep(0, 'v')"), "'v'")
        error = self.fails("async def bad():\n    raise KeyError(1)\nawait bad()", "KeyError")
        self.assertNotIn("kernel.py", "\n".join(error["traceback"]))
        self.assertEqual(self.kernel.value("async def g():\n    return 5\nasyncio.run(g())"), "5")


class Interrupts(Claims):
    def interrupted(self, code, kernel, ready="go\n"):
        kernel.send({"code": "print('go', flush=True)\n" + code})
        kernel.output(until=ready)
        time.sleep(0.1)
        kernel.interrupt()
        events = kernel.finish()
        self.assertEqual(outcome(events), "interrupted")
        self.assertEqual([e["name"] for e in errors(events)], ["KeyboardInterrupt"])
        return errors(events)[0]

    def test_an_interrupt_ends_the_cell_and_keeps_the_state(self):
        for code in ("import time\ntime.sleep(60)", "while True: pass", "import asyncio\nawait asyncio.sleep(60)",
                     "!sleep 60", "import subprocess; subprocess.run(['sleep', '60'])"):
            kernel = self.own()
            kernel.run("kept = 1")
            error = self.interrupted(code, kernel)
            self.assertNotIn("on_interrupt", "\n".join(error["traceback"]))
            self.assertEqual(kernel.value("kept"), "1")

    def test_an_interrupt_reaches_what_a_command_started(self):
        kernel = self.own()
        self.interrupted("!echo up; sleep 3600; true", kernel, ready="up\n")
        self.assertEqual(subprocess.run(["pgrep", "-P", str(kernel.process.pid)], capture_output=True).stdout, b"")

    def test_an_interrupt_between_cells_changes_nothing(self):
        kernel = self.own()
        kernel.run("1")
        for _ in range(20):
            kernel.interrupt()
        self.assertEqual(kernel.value("6*7"), "42")

    def test_interrupts_at_any_moment_leave_the_frames_whole(self):
        kernel = self.own()
        kernel.send({"code": "print('go', flush=True)\nwhile True: display('x' * 100000)"})
        kernel.output(until="go\n")
        while kernel.event()["type"] != "result":
            pass
        kernel.interrupt()
        self.assertEqual(outcome(kernel.finish()), "interrupted")
        self.assertEqual(kernel.value("1"), "1")

    def test_a_cell_that_catches_the_interrupt_goes_on(self):
        kernel = self.own()
        kernel.send({"code": "import time\ntry:\n    print('go', flush=True)\n    time.sleep(3600)\n"
                             "except KeyboardInterrupt: print('caught')\n5"})
        kernel.output(until="go\n")
        kernel.interrupt()
        events = kernel.finish()
        self.assertEqual((outcome(events), results(events)[0]["data"]["text/plain"]), ("ok", "5"))
        self.assertTrue(kernel.output(until="caught\n").endswith("go\ncaught\n"))  # "go" is there twice if its print was interrupted

    def test_an_interrupt_that_another_thread_took_ends_the_cell(self):
        kernel = self.own()
        kernel.send({"code": "import signal, threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
                             "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\nprint('go', flush=True)\ntime.sleep(3600)"})
        kernel.output(until="go\n")
        kernel.interrupt()
        self.assertEqual(outcome(kernel.finish()), "interrupted")

    def test_a_cell_hears_of_one_interrupt(self):
        kernel = self.own()
        kernel.send({"code": "import time\ntry:\n    print('go', flush=True)\n    time.sleep(3600)\n"
                             "except KeyboardInterrupt: time.sleep(1.5)\n5"})
        kernel.output(until="go\n")
        kernel.interrupt()
        events = kernel.finish()
        self.assertEqual((outcome(events), results(events)[0]["data"]["text/plain"]), ("ok", "5"))

    def test_a_cell_cannot_take_the_interrupt_away_from_the_next(self):
        kernel = self.own()
        kernel.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
        self.interrupted("import time\ntime.sleep(60)", kernel)
        kernel.run("import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)")
        kernel.interrupt()
        self.assertEqual(kernel.value("1"), "1")


class Leaving(Claims):
    def leaves(self, code, status):
        kernel = self.own()
        kernel.send({"code": code})
        with self.assertRaises(Died):
            kernel.finish()
        self.assertEqual(kernel.wait(), status)
        return kernel

    def test_exit_in_every_form_ends_the_process_with_its_status(self):
        for code, status in (("exit()", 0), ("quit()", 0), ("exit", 0), ("exit(3)", 3), ("import sys; sys.exit(4)", 4),
                             ("raise SystemExit(5)", 5), ("import sys\nsys.exit()", 0), ("import os; os._exit(6)", 6)):
            with self.subTest(code):
                self.leaves(code, status)

    def test_a_program_that_exits_in_a_notebook_leaves_its_variables(self):
        kernel = self.own()
        for code, value, how in (("kept = 1; import sys; sys.exit(4)", "4", "rich"), ("kept = 2\nraise SystemExit('why')", "why", "notebook"),
                                 ("kept = 3; import sys; sys.exit()", "", "notebook")):
            with self.subTest(code):
                events = kernel.run(code, **{how: True})
                error = [e["error"] for e in events if e["type"] == "error"][0]
                self.assertEqual((error["name"], error["value"]), ("SystemExit", value))
                self.assertEqual(events[-1]["end"]["outcome"], "error")
        self.assertEqual(kernel.value("kept"), "3")
        kernel.send({"code": "exit(5)", "notebook": True})
        with self.assertRaises(Died):
            kernel.finish()
        self.assertEqual(kernel.wait(), 5)

    def test_output_waits_for_what_was_shown_before(self):
        kernel = self.own()
        kernel.send({"code": "display(1)\nprint('after')\ndisplay(2); display(3)"})
        shown = []
        while len(shown) < 3:
            event = kernel.event()
            if event["type"] == "result":
                shown.append(event["result"]["data"]["text/plain"])
                self.assertTrue(event["waits"])
                if len(shown) > 1:
                    self.assertEqual(kernel.output(until="after\n"), "after\n")
                else:
                    time.sleep(0.1)  # the pipe is empty all the time
                    self.assertEqual(kernel.output(), "")
                kernel.send(b"", kind=8)
        self.assertEqual((shown, kernel.finish()[-1]["end"]["outcome"]), (["1", "2", "3"], "ok"))
        self.assertEqual(kernel.value("1"), "1")  # a word that nobody waited for is no request

    def test_who_never_answers_is_waited_for_once(self):
        kernel = self.own()
        begun = time.monotonic()
        kernel.send({"code": "for i in range(400): display(i); print(i)"})
        events = kernel.finish(answers=False)
        self.assertEqual(len(events), 402)
        self.assertLess(time.monotonic() - begun, 200)  # a wait for each is more than an hour
        self.assertTrue(kernel.output(until="399\n").endswith("399\n"))

    def test_what_was_printed_before_the_exit_is_heard(self):
        kernel = self.leaves("import sys\nsys.stdout.write('last words')\nsys.exit('why')", 1)
        self.assertEqual(kernel.output(until="words"), "last words")
        self.assertEqual(kernel.output("err", until="why\n"), "why\n")

    def test_exit_handlers_run(self):
        kernel = self.leaves("import atexit; atexit.register(print, 'bye'); exit()", 0)
        self.assertEqual(kernel.output(until="bye\n"), "bye\n")

    def test_a_crash_is_a_death(self):
        self.leaves("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9)
        self.leaves("import ctypes; ctypes.string_at(0)", -11)


class Surroundings(Claims):
    def test_environment_and_folder_are_for_one_cell(self):
        kernel = self.own(env={"HOME": "/", "A": "old", "PATH": os.environ["PATH"]}, cwd="/")
        with tempfile.TemporaryDirectory() as folder:
            folder = os.path.realpath(folder)
            look = "import os; (os.environ.get('A'), os.environ.get('B'), os.getcwd())"
            self.assertEqual(kernel.value(look, env={"A": "new", "B": "b"}, cwd=folder), repr(("new", "b", folder)))
            self.assertEqual(kernel.value(look), "('old', None, '/')")
            kernel.run("1/0", env={"A": "x", "B": "y"}, cwd=folder)
            self.assertEqual(kernel.value(look), "('old', None, '/')")
            kernel.run("os.environ['B'] = 'mine'; os.chdir('/usr')", env={"B": "y"}, cwd=folder)
            self.assertEqual(kernel.value(look), "('old', None, '/')")
            kernel.run("os.chdir('/usr'); os.environ['B'] = 'mine'")
            self.assertEqual(kernel.value(look), "('old', 'mine', '/usr')")

    def test_a_folder_that_is_not_there_is_an_error(self):
        self.fails("1", "FileNotFoundError", cwd="/no/such/folder")
        self.assertEqual(self.kernel.value("1"), "1")

    def test_an_impossible_variable_is_an_error(self):
        self.fails("1", "ValueError", env={"A": "x\0y"})

    def test_the_environment_reaches_commands(self):
        kernel = self.own()
        kernel.run("!echo $COVE_X", env={"COVE_X": "seen"})
        self.assertEqual(kernel.output(until="\n"), "seen\n")

    def test_modules_in_the_working_folder_can_be_imported(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "beside.py"), "w") as f:
                f.write("value = 9")
            kernel = self.own(cwd=folder)
            self.assertEqual(kernel.value("import beside; beside.value"), "9")

    def test_packages_of_the_user_are_found_as_soon_as_they_are_there(self):
        with tempfile.TemporaryDirectory() as home:
            kernel = self.own(env={"HOME": home, "PATH": os.environ["PATH"]})
            version = kernel.value("import sys; '%d.%d' % sys.version_info[:2]").strip("'")
            site = os.path.join(home, ".local", "lib", "python" + version, "site-packages")
            self.fails("import lately_installed", "ModuleNotFoundError", kernel)
            os.makedirs(site)
            with open(os.path.join(site, "lately_installed.py"), "w") as f:
                f.write("here = True")
            self.assertEqual(kernel.value("import lately_installed; lately_installed.here"), "True")

    def test_nothing_is_written_into_the_home(self):
        with tempfile.TemporaryDirectory() as home:
            kernel = self.own(env={"HOME": home, "PATH": os.environ["PATH"]})
            kernel.run("1/0")
            self.assertEqual(os.listdir(home), [])


class Abuse(Claims):
    def test_descriptors_are_few_and_the_socket_is_high_and_not_inherited(self):
        found = self.kernel.json("{f: _o.readlink('/proc/self/fd/' + f) for f in _o.listdir('/proc/self/fd') if _o.path.exists('/proc/self/fd/' + f)}",
                                 "import os as _o")
        sockets = [int(f) for f, target in found.items() if target.startswith("socket:")]
        self.assertEqual(len(sockets), 1)
        self.assertGreaterEqual(sockets[0], 50)
        self.assertEqual(self.kernel.value("_o.get_inheritable(%d)" % sockets[0]), "False")
        self.assertEqual(sorted(int(f) for f in found if int(f) < 50), [0, 1, 2])

    def test_closing_the_standard_descriptors_is_survived(self):
        kernel = self.own()
        for code in ("import os; [os.close(fd) for fd in (0, 1, 2)]", "import sys; sys.stdout.close(); sys.stderr.close()",
                     "sys.stdout = sys.stderr = None", "del sys.stdout", "sys.stdout = 5", "os.close(1); open('/dev/null')"):
            kernel.run(code)
            self.assertEqual(kernel.value("1"), "1")
        kernel.run("print('still here')")
        self.assertIn("still here", kernel.output(until="still here"))

    def test_a_replaced_stdout_is_the_users_business(self):
        kernel = self.own()
        kernel.run("import io, sys; mine = sys.stdout = io.StringIO()")
        kernel.run("print('captured')")
        self.assertEqual(kernel.value("mine.getvalue()"), "'captured\\n'")
        kernel.run("sys.stdout = sys.__stdout__; print('loud')")
        self.assertEqual(kernel.output(until="loud\n"), "loud\n")

    def test_closing_every_descriptor_ends_the_kernel_cleanly(self):
        kernel = self.own()
        kernel.send({"code": "import os; os.closerange(3, 4096)"})
        with self.assertRaises(Died):
            kernel.finish()
        self.assertEqual(kernel.wait(), 74)

    def test_events_are_never_written_into_a_file_that_took_the_sockets_number(self):
        kernel = self.own()
        with tempfile.NamedTemporaryFile() as f:
            kernel.send({"code": "import os\nos.closerange(3, 4096)\nfd = os.open(%r, os.O_RDWR)\nfor n in range(3, 1200):\n"
                                 "    if n != fd: os.dup2(fd, n)\ndisplay(1)" % f.name})
            with self.assertRaises(Died):
                kernel.finish()
            self.assertEqual(kernel.wait(), 74)
            self.assertEqual(f.read(), b"")

    def test_a_forked_child_does_not_speak_and_does_not_return(self):
        kernel = self.own()
        events = kernel.run("import os\npid = os.fork()\nif pid == 0: display('child')\nelse: status = os.waitpid(pid, 0)[1]\npid == 0")
        self.assertEqual([r["data"]["text/plain"] for r in results(events)], ["False"])
        self.assertEqual(kernel.value("status"), "0")
        self.assertEqual(len(kernel.run("1")), 3)
        kernel.run("pid = os.fork()\nif pid == 0: raise SystemExit(7)\nstatus = os.waitpid(pid, 0)[1]")
        self.assertEqual(kernel.value("os.WEXITSTATUS(status)"), "7")
        kernel.run("pid = os.fork()\nif pid == 0: 1/0\nstatus = os.waitpid(pid, 0)[1]")
        self.assertEqual(kernel.value("os.WEXITSTATUS(status)"), "1")
        self.assertIn("ZeroDivisionError", kernel.output("err", until="ZeroDivisionError"))

    def test_a_forked_child_holds_no_socket(self):
        kernel = self.own()
        kernel.run("import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(60); os._exit(0)")
        child = int(kernel.value("pid"))
        kernel.process.kill()
        try:
            with self.assertRaises(Died):
                kernel.run("1")
        except BrokenPipeError:
            pass
        os.kill(child, signal.SIGKILL)

    def test_multiprocessing_works(self):
        kernel = self.own()
        code = ("import multiprocessing as mp\ndef twice(x): return 2 * x\n"
                "with mp.get_context('fork').Pool(2) as pool: out = pool.map(twice, [1, 2, 3])\nout")
        self.assertEqual(kernel.value(code), "[2, 4, 6]")

    def test_threads_may_print_and_display(self):
        kernel = self.own()
        events = kernel.run("import threading\nts = [threading.Thread(target=lambda: [display(i) for i in range(50)]) for _ in range(4)]\n"
                            "[t.start() for t in ts]; [t.join() for t in ts]; None")
        self.assertEqual(len(results(events)), 200)

    def test_threads_that_display_all_the_time_are_heard_in_cells_only(self):
        kernel = self.own()
        kernel.run("import threading\nstop = threading.Event()\ndef show():\n    while not stop.is_set(): display(0)\n"
                   "for _ in range(4): threading.Thread(target=show).start()")
        for _ in range(50):
            self.assertEqual(kernel.run("1")[0]["type"], "started")  # or a result of the cell before came after its end
        kernel.run("stop.set()")

    def test_a_thread_that_displays_after_its_cell_is_not_heard(self):
        kernel = self.own()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        go, done = os.path.join(folder.name, "go"), os.path.join(folder.name, "done")
        kernel.run("import os, threading, time\ndef late():\n    while not os.path.exists(%r): time.sleep(0.01)\n"
                   "    display('late'); open(%r, 'w').close()\nthreading.Thread(target=late).start()" % (go, done))
        open(go, "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(done):
            self.assertLess(time.monotonic(), until, "the thread never displays")
            time.sleep(0.01)
        self.assertEqual(kinds(kernel.run("2")), ["started", "result", "end"])


# What a branch does with the descriptors of the kernel it is a copy of, played by one kernel: it forgets its files and opens
# them again.
AGAIN = """
import os, sys, socket, json, resource
k = sys.modules["_cove_kernel"]
def mine():
    own = {0, 1, 2, k.the_kernel.channel.fd, *k.the_kernel.streams.kept}
    return [f for f in k.open_files() if f["fd"] not in own]
def again():
    files = mine()
    for f in files: os.close(f["fd"])
    return k.reopen(files)
"""


class Branching(Claims):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.kernel = self.own(cwd=self.folder.name)
        self.kernel.run(AGAIN)

    def test_an_order_to_a_kernel_without_a_zygote_is_refused(self):
        self.kernel.send({}, kind=8)
        self.assertEqual(self.kernel.event(), {"type": "branched", "message": "no socket came with the order"})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frame = struct.pack(">B3sI", 8, b"\0\0\0", 2) + b"{}"
            socket.send_fds(self.kernel.sock, [frame], [theirs.fileno()])
            self.assertEqual(self.kernel.event(), {"type": "branched", "message": "this kernel was not forked from a zygote"})
            theirs.close()
            self.assertEqual(ours.recv(1), b"")  # the kernel has let go of what it was given
        self.assertEqual(self.kernel.value("1 + 1"), "2")

    def test_a_kernel_tells_its_own_descriptors_from_those_of_cells(self):
        self.assertEqual(self.kernel.json("mine()"), [])
        self.assertEqual(self.kernel.json("[(f['kind'], f['path'], f['position']) for f in mine()]",
                                          "f = open('text', 'w'); f.write('abc'); f.flush()"),
                         [["file", os.path.join(os.path.realpath(self.folder.name), "text"), 3]])

    def test_files_keep_number_position_and_mode(self):
        self.assertEqual(self.kernel.json("[numbers == [f.fileno() for f in fs], lost, r.read(3), os.read(raw, 9).decode()]", """
with open("text", "w") as f: f.write("0123456789")
gap = open("text"); r = open("text"); w = open("new", "w"); a = open("log", "a"); u = open("text", "r+")
raw = os.open("text", os.O_RDONLY | os.O_NONBLOCK); os.lseek(raw, 7, 0); os.set_inheritable(raw, True)
r.buffer.raw.read(4); w.write("one "); w.flush(); a.write("one "); a.flush(); fs = [r, w, a, u]; gap.close()
numbers = [f.fileno() for f in fs]; lost = again()
w.write("two"); w.flush(); a.write("two"); a.flush()"""), [True, [], "456", "789"])
        self.assertEqual(self.kernel.json("[open('new').read(), open('log').read(), open('text').read()]"),
                         ["one two", "one two", "0123456789"])
        self.assertEqual(self.kernel.json("[os.get_inheritable(raw), os.get_blocking(raw), os.get_inheritable(r.fileno()), "
                                          "os.get_blocking(r.fileno())]"), [True, False, False, True])

    def test_a_file_is_not_made_or_emptied_again(self):
        self.assertEqual(self.kernel.json("[lost, open('text').read()]", """
fd = os.open("text", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_EXCL); os.write(fd, b"kept"); lost = again()"""),
                         [[], "kept"])

    def test_what_cannot_be_opened_again_is_told_and_ends_cleanly(self):
        lost = self.kernel.json("again()", """
gone = open("gone", "w"); os.unlink("gone")
odd = open("ends with (deleted)", "w"); r, w = os.pipe(); one, two = socket.socketpair(); os.mkfifo("fifo"); fifo = os.open("fifo", os.O_RDWR)
import pty; master, slave = pty.openpty(); null = open("/dev/null"); status = open("/proc/self/status")""")
        folder = os.path.realpath(self.folder.name)
        told = sorted((f["kind"], f["what"].split(" (descriptor")[0].split(":")[0]) for f in lost)
        terminals = [t for t in told if t[1].startswith("/dev/")]
        self.assertEqual(len(terminals), 2, told)
        self.assertEqual([t for t in told if t not in terminals], [
            ("file", folder + "/ends with (deleted)"), ("file", folder + "/gone (deleted)"), ("pipe", folder + "/fifo"),
            ("pipe", "pipe"), ("pipe", "pipe"), ("socket", "socket"), ("socket", "socket")])
        self.assertEqual(self.kernel.json("said", """
def note(f):
    try: return f()
    except OSError as e: return type(e).__name__
said = [note(f) for f in (lambda: len(os.read(r, 1)), lambda: os.write(w, b"x"), lambda: os.write(fifo, b"x"), lambda: len(one.recv(1)),
                          lambda: two.send(b"x"), lambda: os.write(master, b"x"), lambda: null.read(), lambda: len(status.read()) > 0)]"""),
                         [0, "BrokenPipeError", "BrokenPipeError", 0, "BrokenPipeError", "BrokenPipeError", "", True])

    def test_a_descriptor_moves_out_of_the_way(self):
        self.assertEqual(self.kernel.json("[stays == fd, moved, os.fstat(moved).st_ino == node, os.get_inheritable(moved), closed]", """
fd = os.open("/", os.O_RDONLY); node = os.fstat(fd).st_ino
stays = k.clear_of(fd, [fd + 1, 5000])
taken = [fd, *range(900, 950)]
moved = k.clear_of(fd, taken)
try: os.fstat(fd); closed = False
except OSError: closed = True"""), [True, 950, True, False, True])
        # Where numbers are few, one from below will do.
        self.assertEqual(self.kernel.json("k.clear_of(fd, [fd, *range(20, 64)])",
                                          "fd = os.dup(moved); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"), 19)

    def test_limits_that_a_cell_has_set_are_kept(self):
        self.assertEqual(self.kernel.json("[resource.getrlimit(i) for i in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)]", """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
k.keep_limits({resource.RLIMIT_CORE: (1 << 20, -1), resource.RLIMIT_NOFILE: (200, 1000)})"""), [[0, 0], [200, 300]])
        self.assertEqual(self.kernel.json("resource.getrlimit(resource.RLIMIT_NOFILE)",
                                          "k.keep_limits({resource.RLIMIT_NOFILE: (100, 100)})"), [200, 300])

    def test_a_folder_that_is_gone_is_replaced(self):
        self.assertEqual(self.kernel.json("[first, os.getcwd()]", """
os.mkdir("there"); k.go_back(os.path.abspath("there")); first = os.path.basename(os.getcwd())
os.environ["HOME"] = "/usr"; k.go_back("/not there")"""), ["there", "/usr"])


class Rich(Claims):
    def test_display_shows_more_than_the_last_value(self):
        shown = results(self.kernel.run("display(1, 'two')\n3"))
        self.assertEqual([(r["data"]["text/plain"], r.get("main", False)) for r in shown],
                         [("1", False), ("'two'", False), ("3", True)])

    def test_objects_show_themselves_in_many_types(self):
        self.kernel.run("class M:\n    def __init__(self, **k): self.__dict__.update(k)\n    def __repr__(self): return 'M'\n"
                        "    def _repr_html_(self): return '<b>h</b>'\n    def _repr_markdown_(self): return '*m*'\n"
                        "    def _repr_svg_(self): return '<svg/>'\n    def _repr_png_(self): return b'\\x89PNG'\n"
                        "    def _repr_jpeg_(self): return b'jpg'\n    def _repr_pdf_(self): return b'%PDF'\n"
                        "    def _repr_latex_(self): return '$x$'\n    def _repr_json_(self): return {'a': [1, None]}\n"
                        "    def _repr_javascript_(self): return 'alert(1)'\n"
                        "    def _repr_mimebundle_(self, include=None, exclude=None): return {'application/vnd.x+json': {'v': 1}}")
        data = results(self.kernel.run("M()"))[0]["data"]
        self.assertEqual(data, {
            "text/plain": "M", "text/html": "<b>h</b>", "text/markdown": "*m*", "image/svg+xml": "<svg/>",
            "image/png": base64.b64encode(b"\x89PNG").decode(), "image/jpeg": base64.b64encode(b"jpg").decode(),
            "application/pdf": base64.b64encode(b"%PDF").decode(), "text/latex": "$x$",
            "application/json": {"a": [1, None]}, "application/javascript": "alert(1)", "application/vnd.x+json": {"v": 1},
        })

    def test_json_that_is_no_json_is_made_so(self):
        data = results(self.kernel.run("class J:\n    def _repr_json_(self): return {1: float('nan'), 'k': {2}, 'big': 10**5000, 'o': object}\nJ()"))[0]["data"]
        self.assertEqual(data["application/json"]["1"], None)
        self.assertEqual(data["application/json"]["k"], [2])


class State(Claims):
    def held(self, code, kernel=None):
        return (kernel or self.kernel).run(code, state=True)[-1]["end"]["value"]

    def test_the_end_tells_what_is_held_only_when_asked(self):
        self.assertNotIn("value", self.kernel.run("asked = 1")[-1]["end"])
        self.assertEqual(self.held("asked")["variables"]["asked"], {"type": "int", "value": "1"})

    def test_only_names_of_the_user_are_told(self):
        kernel = self.own()
        self.assertEqual(self.held("", kernel)["variables"], {})
        self.assertEqual(sorted(self.held("a = 1; _b = 2; import json; In, Out", kernel)["variables"]), ["a", "json"])

    def test_values_of_pythons_own_types_are_written_out_in_bounds(self):
        kernel = self.own()
        held = self.held("""
i, f, c, b, n, s, y, r = 7, 1.5, 1j, True, None, "h\u00e4", b"x", range(3)
huge, text = 1 << 100000, "x" * 5000
one, empty, cycle, deep = (1,), set(), [], [[[[[[1]]]]]]
cycle.append(cycle)
many = list(range(100000))
""", kernel)["variables"]
        self.assertEqual({k: held[k]["value"] for k in "i f c b n s y r one empty huge deep".split()}, {
            "i": "7", "f": "1.5", "c": "1j", "b": "True", "n": "None", "s": "h\u00e4", "y": "b'x'", "r": "range(0, 3)",
            "one": "(1,)", "empty": "set()", "huge": "<int of 100001 bits>", "deep": "[[[[[...]]]]]"})
        self.assertEqual((len(held["text"]["value"]), held["text"]["value"][-3:]), (1000, "..."))
        self.assertLessEqual(len(held["many"]["value"]), 1000)
        self.assertLessEqual(len(held["cycle"]["value"]), 1000)

    def test_nothing_of_the_users_runs(self):
        kernel = self.own()
        held = self.held("""
import sys
ran = []
class Meta(type):
    def __getattribute__(cls, name): ran.append(name); return super().__getattribute__(name)
    def __instancecheck__(cls, value): ran.append("isinstance"); return True
class Odd(metaclass=Meta):
    def __getattribute__(self, name): ran.append(name); raise SystemExit
    def __repr__(self): ran.append("repr"); raise SystemExit
    __str__ = __len__ = __iter__ = __hash__ = __eq__ = __repr__
class Mine(dict):
    def items(self): ran.append("items"); return []
odd, mine, inside = Odd(), Mine(a=1), [Odd()]
ndarray = type("ndarray", (), {"shape": property(lambda s: ran.append("shape"))})
fake = ndarray()
del ran[:]
""", kernel)["variables"]
        self.assertEqual({k: held[k]["value"] for k in ("odd", "mine", "inside", "fake")},
                         {"odd": "<non-serializable>", "mine": "<non-serializable>", "inside": "[<Odd>]", "fake": "<non-serializable>"})
        self.assertEqual(held["odd"]["type"], "Odd")
        self.assertEqual(kernel.value("ran"), "[]")

    def test_many_variables_are_bounded_and_said_to_be(self):
        kernel = self.own()
        held = self.held("for i in range(3000): globals()['v%04d' % i] = 'x' * 100", kernel)
        self.assertTrue(held["truncated"])
        self.assertLessEqual(len(held["variables"]), 500)

    def test_elements_are_bounded_over_all_variables(self):
        """The state is cut by a count, so that it is the same on every machine."""
        held = self.held("for i in range(400): globals()['v%03d' % i] = [0] * 1000\ndel i", self.own())
        self.assertEqual(held["variables"].keys(), {"v%03d" % i for i in range(150)})  # 200 elements of each, 30,000 of all
        self.assertTrue(held["truncated"])

    def test_a_preempted_look_at_the_variables_is_whole(self):
        """Other programs have the CPU for 100 ms before each variable."""
        held = self.by_clocks(passes=0.1, works=0.001)
        self.assertEqual((len(held["variables"]), held["truncated"]), (13, False))

    def test_a_look_at_the_variables_ends_when_it_takes_too_long(self):
        for passes, works, told in ((0.5, 0.001, 4), (0.1, 0.0625, 3)):  # more than 2 s, more than 0.2 s on the CPU
            with self.subTest((passes, works)):
                held = self.by_clocks(passes, works)
                self.assertEqual((len(held["variables"]), held["truncated"]), (told, True))

    def by_clocks(self, passes, works):
        """The state of 13 variables by clocks that go on by so many seconds each time that they are read."""
        kernel = self.own()
        self.held("", kernel)  # which loads state.py
        return self.held("""
import sys as _sys
class _Clocks:
    passed = worked = 0
    def monotonic(self): self.passed += %r; return self.passed
    def thread_time(self): self.worked += %r; return self.worked
_sys.modules["_cove_state"].time = _Clocks()
for _i in range(13): globals()["v%%02d" %% _i] = _i
""" % (passes, works), kernel)

    def test_names_that_are_no_names_are_passed_over(self):
        kernel = self.own()
        self.assertEqual(sorted(self.held("class Name(str): pass\nglobals()[7] = globals()[Name('n')] = 1; x = 1", kernel)["variables"]), ["Name", "x"])


class WithIPython(Claims):
    def test_displays_are_updated_by_id(self):
        shown = results(self.kernel.run("h = display('a', display_id='d1')\nh.update('b')"))
        self.assertEqual([(r["data"]["text/plain"], r["id"], r.get("update", False)) for r in shown],
                         [("'a'", "d1", False), ("'b'", "d1", True)])

    def test_clear_output_is_tolerated(self):
        kernel = self.own()
        self.assertEqual(kinds(kernel.run("from IPython.display import clear_output; clear_output(wait=True)")), ["started", "end"])
        self.assertEqual(kernel.output(), "")

    def test_ipython_displays_travel(self):
        data = [r["data"] for r in results(self.kernel.run(
            "from IPython.display import *\ndisplay(HTML('<i>'), Markdown('*m*'), JSON({'a': 1}), SVG('<svg/>'), Latex('$x$'), Javascript('j'))"))]
        self.assertEqual([sorted(set(d) - {"text/plain"}) for d in data],
                         [["text/html"], ["text/markdown"], ["application/json"], ["image/svg+xml"], ["text/latex"], ["application/javascript"]])

    def test_magics_work(self):
        kernel = self.own()
        for code in ("%timeit -n1 -r1 1", "%time 1", "%%time\nx = 1", "%who", "%env HOME", "%cd /", "%precision 3", "%lsmagic",
                     "%%capture out\nprint('hidden')", "%matplotlib inline", "%pwd", "files = !ls /", "%%writefile /tmp/cove-run-magic.py\nran = 1", "%run /tmp/cove-run-magic.py", "%load_ext autoreload"):
            self.assertEqual(outcome(kernel.run(code)), "ok", (code, kernel.output("err")))
        self.assertEqual(kernel.value("out.stdout"), "'hidden\\n'")
        self.assertEqual(kernel.value("'usr' in files"), "True")

    def test_right_python_that_ipython_reads_otherwise(self):
        kernel = self.own()
        kernel.run("%cd /usr")
        self.assertEqual(kernel.value("pwd"), "'/usr'")  # a magic without its sign
        self.assertEqual(kernel.value("pwd = 3\npwd"), "3")  # not in a cell of more lines, nor once it is a name
        kernel.run("shell = get_ipython()\nshell.input_transformers_post.append(lambda lines: [l.replace('one', 'two') for l in lines])")
        self.assertEqual(kernel.value("one = 2\ntwo + 1"), "3")
        kernel.run("shell.input_transformers_post.clear()")
        self.assertEqual(kernel.value("one = 5\ntwo"), "2")
        kernel.run("%macro twice 1\nshell.autocall = 2")
        self.assertEqual(kernel.value("len 'abc'"), "3")

    def test_an_unknown_magic_is_an_error(self):
        self.fails("%nosuchmagic", "UsageError")

    def test_variables_reach_commands(self):
        kernel = self.own()
        kernel.run("name = 'Ada'\n!echo hi $name {1+1}")
        self.assertEqual(kernel.output(until="\n"), "hi Ada 2\n")

    def test_question_marks_ask_for_help(self):
        self.assertEqual(outcome(self.kernel.run("len?")), "ok")

    def test_hooks_run(self):
        kernel = self.own()
        kernel.run("ip = get_ipython(); seen = []\nip.events.register('post_run_cell', lambda r: seen.append((r.result, r.success)))\n"
                   "ip.events.register('pre_run_cell', lambda i: seen.append(i.raw_cell))")
        kernel.run("7")
        self.assertEqual(kernel.value("seen[1:3] if seen[0] != '7' else seen[:2]"), "['7', (7, True)]")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        go = os.path.join(folder.name, "go")
        kernel.run("import os, time; waits = False\ndef hook():\n    if waits: seen.append('waits')\n"
                   "    while waits and not os.path.exists(%r): time.sleep(0.01)\nip.events.register('post_execute', hook)" % go)
        kernel.send({"code": "waits = True; 8"})
        self.assertEqual(kernel.event()["type"], "started")
        self.assertEqual(kernel.event()["type"], "result")  # the hook, which runs after the value is told, is not over
        open(go, "w").close()
        kernel.finish()
        self.assertEqual(kernel.value("seen.count('waits')"), "1")

    def test_interactivity_all_shows_every_expression(self):
        kernel = self.own()
        kernel.run("get_ipython().ast_node_interactivity = 'all'")
        self.assertEqual([r["data"]["text/plain"] for r in results(kernel.run("1\n2"))], ["1", "2"])

    def test_a_warning_of_the_compiler_is_told_once(self):
        kernel = self.own()
        for i, code in enumerate(("x = 5\nx is 5", "x is 5", "import os\n!true\nx is 5", "x is 5\ny = 1")):
            kernel.run(code)
            kernel.run("import sys; print('after', %d, file=sys.stderr, flush=True)" % i)
            told = kernel.output("err", until="after %d\n" % i)
            self.assertEqual(told.count("SyntaxWarning"), i + 1, (code, told))

    def test_future_imports_stay(self):
        kernel = self.own()
        kernel.run("from __future__ import annotations")
        self.assertEqual(kernel.value("def f(x: int): pass\nf.__annotations__"), "{'x': 'int'}")

    def test_a_custom_formatter_for_a_simple_type_is_used(self):
        kernel = self.own()
        kernel.run("get_ipython().display_formatter.formatters['text/html'].for_type(int, lambda n: '<b>%d</b>' % n)")
        self.assertEqual(results(kernel.run("5"))[0]["data"], {"text/plain": "5", "text/html": "<b>5</b>"})

    def test_short_values_look_as_ipython_prints_them(self):
        kernel = self.own()
        values = ("{}", "[]", "()", "(1,)", "{'b': 1.5, 'a': None}", r"['x\n', b'y', True]", "3.14", "float('nan')", "1e100", "-0.0", "['a' * 75]",
                  "['a' * 76]", "['a' * 74, 'b']", "{'k': 'v' * 70}", "{'k': 'v' * 72}", "[[1]]", "{'a': {'b': 1}}", "{3: {2, 1}}", "[1] * 26", "[1] * 27",
                  "[0.1] * 16", "list(range(100))", r"['\u2028', 'é']", "type('L', (list,), {})([1])", "collections.OrderedDict(a=1)", "(None, 1)")
        kernel.run("from IPython.lib.pretty import pretty\nimport collections")
        for value in values:
            printed = bytes.fromhex(kernel.value("pretty(%s).encode().hex()" % value)[1:-1]).decode()
            self.assertEqual(kernel.value(value), printed, value)
        kernel.run("%precision 2")
        self.assertEqual([kernel.value(v) for v in ("1.23456", "[1.23456]", "{'a': 1.23456}", "['a']")], ["1.23", "[1.23]", "{'a': 1.23}", "['a']"])
        kernel.run("%precision\nget_ipython().display_formatter.formatters['text/plain'].for_type(float, lambda x, p, c: p.text('!'))")
        self.assertEqual([kernel.value(v) for v in ("1.5", "[1.5]", "(1, 1.5)", "(1, 2)")], ["!", "[!]", "(1, !)", "(1, 2)"])
        kernel.run("[10**5000]")  # which Python does not write out: IPython complains of it, and keeps it
        self.assertEqual(kernel.value("_[0] == 10**5000"), "True")
        kernel.run("plain = get_ipython().display_formatter.formatters['text/plain']; plain.max_seq_length = 3")
        self.assertEqual(kernel.value("[1, 2, 3, 4]"), "[1, 2, 3, ...]")
        kernel.run("plain.max_seq_length = 1000; plain.max_width = 10")
        self.assertEqual(kernel.value("[1000, 2000, 3000]"), "[1000,\n 2000,\n 3000]")
        kernel.run("plain.max_width = 79; get_ipython().display_formatter.mimebundle_formatter.for_type(list, lambda l: {'text/bundle': 'l'})")
        self.assertEqual(results(kernel.run("[1]"))[0]["data"], {"text/plain": "[1]", "text/bundle": "l"})
        kernel.run("get_ipython().display_formatter.formatters['text/html'].for_type(dict, lambda d: '<b>')")
        self.assertEqual(results(kernel.run("{'a': 1}"))[0]["data"], {"text/plain": "{'a': 1}", "text/html": "<b>"})

    def test_there_is_one_thread(self):
        kernel = self.own()
        kernel.run("1/0")
        self.assertEqual(kernel.value("import os; len(os.listdir('/proc/self/task'))"), "1")

    def test_a_data_frame_has_html(self):
        data = results(self.kernel.run("import pandas as pd\npd.DataFrame({'a': [1]})"))[0]["data"]
        self.assertIn("<table", data["text/html"])
        self.assertIn("a", data["text/plain"])

    def test_open_figures_are_shown_and_closed(self):
        kernel = self.own()
        shown = results(kernel.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.figure(); plt.plot([3])\nNone"))
        self.assertEqual(len(shown), 2)
        for result in shown:
            self.assertEqual(base64.b64decode(result["data"]["image/png"])[:4], b"\x89PNG")
        self.assertEqual(kernel.value("plt.get_fignums(), plt.get_backend().lower()"), "([], 'agg')")
        self.assertEqual(len(results(kernel.run("plt.plot([1]); plt.show(); plt.plot([2]); plt.show()"))), 2)
        self.assertEqual(results(kernel.run("plt.figure(); None")), [])
        self.assertEqual(len(results(kernel.run("plt.plot([1]); 1/0"))), 1)
        self.assertEqual(kernel.output("err"), "")

    def test_figure_formats_can_be_chosen(self):
        kernel = self.own()
        kernel.run("%matplotlib inline\n%config InlineBackend.figure_formats = ['svg']")
        shown = results(kernel.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]); None"))
        self.assertIn("<svg", shown[0]["data"]["image/svg+xml"])

    def test_a_figure_is_a_chart_when_that_is_wanted(self):
        kernel = self.own()
        kernel.run("import matplotlib.pyplot as plt")
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "charts.json")) as f:
            cases = json.load(f)
        for case in cases:
            with self.subTest(case["name"]):
                shown = results(kernel.run(case["code"] + "\nNone", rich=True))
                self.assertEqual(len(shown), 1)
                chart = shown[0]["data"][CHART]
                if "x_scale" in chart and "x_ticks" not in case["chart"]:  # where they are differs between matplotlib's versions
                    chart = {k: v for k, v in chart.items() if "_tick" not in k}
                self.assertEqual(chart, case["chart"])
                self.assertIn("image/png", shown[0]["data"])
        self.assertNotIn(CHART, results(kernel.run("plt.plot([1, 2]); None"))[0]["data"])
        self.assertEqual(results(kernel.run("plt.axes(); None", rich=True))[0]["data"].keys(), {"text/plain", "image/png"})
        self.assertNotIn(CHART, results(kernel.run("plt.plot(range(200000)); None", rich=True))[0]["data"])

    def test_a_data_frame_is_data_when_that_is_wanted(self):
        make = ("import pandas as pd\npd.DataFrame({'n': [1, 2], 'f': [0.5, None], 't': pd.to_datetime(['2024-01-01', None]), 's': ['a', None], "
                "5: [True, False]})")
        data = results(self.kernel.run(make, rich=True))[0]["data"]
        self.assertEqual(data[DATA], {"n": [1, 2], "f": [0.5, None], "t": ["2024-01-01T00:00:00", None], "s": ["a", None], "5": [True, False]})
        self.assertNotIn(DATA, results(self.kernel.run(make))[0]["data"])
        shown = results(self.kernel.run(make.replace("pd.DataFrame", "display(pd.DataFrame") + ")", rich=True))
        self.assertIn(DATA, shown[0]["data"])
        rows = results(self.kernel.run("pd.DataFrame({'a': range(20000)})", rich=True))[0]["data"][DATA]["a"]
        self.assertEqual(len(rows), 10000)

    def test_pictures_are_shown_when_that_is_wanted(self):
        kernel = self.own()
        kernel.run("import os, tempfile; os.chdir(tempfile.mkdtemp())")
        make = "from PIL import Image\np = Image.new('RGB', (4, 4), 'red')\n"
        self.assertEqual(results(kernel.run(make + "p.save('a.png')")), [])
        for call in ("p.save('b.png')", "p.show()", "p.convert('CMYK').save('c.jpg')"):
            shown = results(kernel.run(make + call, rich=True))
            self.assertEqual([base64.b64decode(r["data"]["image/png"])[:4] for r in shown], [b"\x89PNG"], call)
        self.assertEqual(kernel.value("sorted(os.listdir())"), "['a.png', 'b.png', 'c.jpg']")
        self.assertEqual(len(results(kernel.run("for i in range(30): p.save('%d.png' % i)", rich=True))), 20)
        self.assertEqual(results(kernel.run("import io; p.save(io.BytesIO(), 'PNG')", rich=True)), [])
        shown = results(kernel.run("import matplotlib.pyplot as plt; plt.plot([1]); plt.savefig('f.png'); None", rich=True))
        self.assertEqual(len(shown), 1)

    def test_the_shape_of_tables_is_told(self):
        held = self.kernel.run("import numpy as np, pandas as pd\narr = np.zeros((2, 3), 'int16')\nframe = pd.DataFrame({'a': [1, 2], 'b': [3, 4]})\n"
                               "column = frame['a']", state=True)[-1]["end"]["value"]["variables"]
        self.assertEqual({k: held[k] for k in ("arr", "frame", "column")}, {
            "arr": {"type": "ndarray", "value": "array of shape (2, 3), int16"},
            "frame": {"type": "DataFrame", "value": "2 rows x 2 columns: a, b"}, "column": {"type": "Series", "value": "2 rows"}})

    def test_a_figure_as_value_is_an_image(self):
        shown = results(self.kernel.run("from matplotlib.figure import Figure\nFigure()"))
        self.assertIn("image/png", shown[0]["data"])


if SHELL == "plain":
    del WithIPython
del Claims

if __name__ == "__main__":
    unittest.main(verbosity=2)

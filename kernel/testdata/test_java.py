"""Claims about the kernel of Java."""

import os
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer import Died, Started  # noqa: E402

JAVA = os.environ.get("COVE_TEST_JAVA") or "java"
OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8", "--add-modules", "jdk.jshell"]
for package in ("java.io", "java.lang", "java.util"):
    OPTIONS += ["--add-opens", "java.base/%s=ALL-UNNAMED" % package]


def results(events):
    return [e["result"] for e in events if e["type"] == "result"]


def errors(events):
    return [e["error"] for e in events if e["type"] == "error"]


def outcome(events):
    return events[-1]["end"]["outcome"]


def start(**options):
    return Started(JAVA, program=OPTIONS + ["kernel.java"], **options)


class Java(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kernel = start(env=dict(os.environ, HAVE="1"), cwd="/usr")

    @classmethod
    def tearDownClass(cls):
        cls.kernel.close()

    def own(self):
        kernel = start()
        self.addCleanup(kernel.close)
        return kernel

    def test_it_says_what_it_is(self):
        self.assertEqual(self.kernel.ready["pid"], self.kernel.process.pid)
        self.assertRegex(self.kernel.ready["message"], r"^java \d")
        self.assertEqual(self.kernel.output("err"), "")

    def test_the_value_of_the_last_expression_is_shown(self):
        for code, text in (("1 + 1", "2"), ('"a\\n\u00e9\U0001f600"', '"a\\n\u00e9\U0001f600"'), ("List.of(1, 2)", "[1, 2]"), ("int n = 0; for (int i = 0; i < 4; i++) n += i; n", "6"),
                           ("int sum(int a,\n  int b) {\n  return a + b;\n}\nsum(1, 2)", "3")):
            self.assertEqual(self.kernel.value(code), text, code)
        for code in ("", "// nothing", "int unseen = 1;", "void f() {}", "f();"):
            self.assertEqual(results(self.kernel.run(code)), [], code)

    def test_state_is_kept_and_cells_are_counted(self):
        first = self.kernel.run("int v = 3; class K { int k = 5; } int f() { return 4; }")[0]["count"]
        self.assertEqual(self.kernel.value("v + f() + new K().k"), "12")
        self.assertEqual(self.kernel.run("6", silent=True)[1]["type"], "end")
        self.assertEqual(self.kernel.run("7")[0]["count"], first + 2)

    def test_output_is_heard_before_what_follows_it(self):
        self.kernel.run('System.out.print("gr\u00fcn\\n"); System.err.print("oh\\n"); System.out.write(120);')
        self.assertIn("gr\u00fcn\nx", self.kernel.output(until="x"))
        self.assertIn("oh\n", self.kernel.output("err", until="oh\n"))

    def test_errors_are_told(self):
        for code, name, value, line in (
                ('throw new IllegalStateException("bad");', "EvalException", "java.lang.IllegalStateException: bad", "    at (#"),
                ("throw new RuntimeException();", "EvalException", "java.lang.RuntimeException", "    at (#"),
                ('void g() { throw new RuntimeException("deep", new IOException("cause")); }\ng()', "EvalException", "java.lang.RuntimeException: deep", "    at g(#"),
                ("int wrong = nothing;", "CompilationException", "cannot find symbol\n  symbol:   variable nothing\n  location: class", "  int wrong = nothing;"),
                ("if (true", "CompilationException", None, "  if (true"),
                ("int later() { return never(); }\nlater()", "UnresolvedReferenceException", None, "    at later(#")):
            events = self.kernel.run(code)
            found = errors(events)
            self.assertEqual((len(found), outcome(events)), (1, "error"), code)
            self.assertEqual(found[0]["name"], name, code)
            if value is not None:
                self.assertEqual(found[0]["value"], value)
            self.assertTrue(any(text.startswith(line) for text in found[0]["traceback"]), found)
        self.assertEqual(self.kernel.value("1"), "1")

    def test_what_comes_after_an_error_is_not_run(self):
        self.kernel.run('int ran = 1; if (true) throw new RuntimeException(); ran = 2;')
        self.assertEqual(self.kernel.value("ran"), "1")

    def test_environment_of_a_cell(self):
        code = 'System.getenv("HAVE") + System.getProperty("HAVE") + System.getenv("MORE") + System.getProperty("MORE")'
        self.assertEqual(self.kernel.value(code, env={"HAVE": "2", "MORE": "\u00e9"}), '"22\u00e9\u00e9"')
        child = 'var b = new ProcessBuilder("sh", "-c", "echo $HAVE$MORE"); b.environment(); new String(b.start().getInputStream().readAllBytes()).strip()'
        self.assertEqual(self.kernel.value(child, env={"MORE": "3"}), '"13"')
        self.assertEqual(self.kernel.value(code), '"11nullnull"')

    def test_the_directory_is_the_one_it_was_started_in(self):
        self.assertEqual(self.kernel.value('Path.of("").toAbsolutePath().toString()', cwd="/usr"), '"/usr"')
        self.kernel.run("1", cwd="/tmp")
        self.assertIn("cannot leave the directory it was started in, /usr", self.kernel.output("err", until="/usr"))

    def test_an_interrupt_ends_the_cell_and_keeps_the_state(self):
        self.kernel.run("int kept = 1;")
        for code in ('System.out.println("go"); while (true) {}', 'System.out.println("go"); while (true) Thread.sleep(10);',
                     'System.out.println("go"); Thread.sleep(100000);', 'System.out.println("go"); for (int i = 0; ; i++) { try { Thread.sleep(1); } catch (Exception e) {} }'):
            before = self.kernel.output().count("go")
            self.kernel.send(dict(id="1", code=code + " kept = 2;"))
            while self.kernel.output().count("go") == before:
                pass
            self.kernel.interrupt()
            events = self.kernel.finish()
            self.assertEqual((outcome(events), [e["name"] for e in errors(events)]), ("interrupted", ["KeyboardInterrupt"]), code)
            self.assertEqual(self.kernel.value("kept"), "1")

    def test_an_interrupt_of_nothing_changes_nothing(self):
        before = self.signals_heard()
        self.kernel.interrupt()
        until = time.monotonic() + 60
        while self.signals_heard() == before:
            self.assertLess(time.monotonic(), until, "Java never hears the signal")
            time.sleep(0.01)
        time.sleep(5)  # a thread that Java starts for the signal calls the kernel
        self.assertEqual(self.kernel.value("Thread.sleep(200); 1"), "1")

    def signals_heard(self):
        """How often the thread of Java's that waits for signals has waited."""
        for task in os.listdir("/proc/%d/task" % self.kernel.process.pid):
            with open("/proc/%d/task/%s/status" % (self.kernel.process.pid, task)) as f:
                status = dict(line.split(":\t", 1) for line in f if ":\t" in line)
            if status["Name"].startswith("Signal Dispatch"):
                return int(status["voluntary_ctxt_switches"])
        raise AssertionError("no thread waits for signals")

    def test_an_environment_that_no_process_can_have_is_left_out(self):
        self.kernel.value("int held = 5; held")
        for env in ({"A=B": "1"}, {"A": "a\0b"}, {"": "1"}):
            self.kernel.send(dict(id="1", code="held", env=env))
            self.assertEqual(outcome(self.kernel.finish()), "ok", env)
        self.kernel.send(dict(id="1", code="held", cwd="/a\0b"))
        self.assertEqual(outcome(self.kernel.finish()), "ok")

    def test_a_stream_that_fails_is_the_cells_own_trouble(self):
        kernel = self.own()
        kernel.run("System.setOut(new java.io.PrintStream(System.out) { public void flush() { throw new RuntimeException(); } });")
        self.assertEqual(outcome(kernel.run("int still = 1;")), "ok")  # it has not ended

    def test_large_values_are_replaced_by_a_note(self):
        self.assertEqual(len(self.kernel.value('"%".repeat(2 << 20)')), (2 << 20) + 2)
        shown = results(self.kernel.run('"%".repeat(9 << 20)'))
        self.assertIn("left out", shown[0]["data"]["text/plain"])
        found = errors(self.kernel.run('throw new RuntimeException("%".repeat(9 << 20));'))
        self.assertEqual(len(found[0]["value"]), 10000)

    def test_exit_ends_the_kernel(self):
        kernel = self.own()
        with self.assertRaises(Died):
            kernel.run("System.exit(3);")
        self.assertEqual(kernel.wait(), 3)

    def test_the_kernel_ends_with_its_socket(self):
        kernel = self.own()
        kernel.send(dict(id="1", code="while (true) Thread.sleep(10);"))
        kernel.event()
        kernel.sock.close()
        self.assertEqual(kernel.wait(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

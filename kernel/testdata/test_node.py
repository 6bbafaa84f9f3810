"""Claims about the kernel of JavaScript and TypeScript."""

import os
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer import Died, Started  # noqa: E402

NODE = os.environ.get("COVE_TEST_NODE") or "node"


def version():
    return tuple(int(n) for n in subprocess.check_output([NODE, "--version"], text=True).strip().lstrip("v").split(".")[:2])


def results(events):
    return [e["result"] for e in events if e["type"] == "result"]


def errors(events):
    return [e["error"] for e in events if e["type"] == "error"]


def outcome(events):
    return events[-1]["end"]["outcome"]


def start(language="javascript", **options):
    return Started(NODE, program=["--no-warnings", "--expose-internals", "node.js", language], **options)


class JavaScript(unittest.TestCase):
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

    def test_the_value_of_the_last_expression_is_shown(self):
        for code, text in (("1 + 1", "2"), ("'a'", "'a'"), ("({a: 1})", "{ a: 1 }"), ("{b: 2}", "{ b: 2 }"), ("null", "null"), ("[1, 2]", "[ 1, 2 ]"),
                           ("let n = 0; for (let i = 0; i < 4; i++) n += i; n", "6")):
            self.assertEqual(self.kernel.value(code), text, code)
        for code in ("", "// nothing", "undefined", "var unseen = 1"):
            self.assertEqual(results(self.kernel.run(code)), [], code)

    def test_state_is_kept_and_cells_are_counted(self):
        kernel = self.own()
        self.assertEqual(kernel.run("const c = 1; let l = 2; var v = 3; function f() { return 4 } class K { constructor() { this.k = 5 } }")[0],
                         {"type": "started", "count": 1})
        self.assertEqual(kernel.value("[c, l, v, f(), new K().k].join()"), "'1,2,3,4,5'")
        self.assertEqual(kernel.run("6", silent=True)[1]["type"], "end")
        self.assertEqual(kernel.run("7")[0]["count"], 3)

    def test_await_works_at_top_level(self):
        kernel = self.own()
        self.assertEqual(kernel.value("async function main() { return 'Hello' }\nawait main()"), "'Hello'")
        kernel.run("const late = await new Promise(r => setTimeout(() => r(9), 20))")
        self.assertEqual(kernel.value("late"), "9")
        self.assertEqual([e["value"] for e in errors(kernel.run("await Promise.reject(new TypeError('no'))"))], ["no"])

    def test_a_promise_at_the_end_is_what_it_becomes(self):
        kernel = self.own()
        self.assertEqual(kernel.value("async function main() { return 'Hello' }\nmain()"), "'Hello'")
        self.assertEqual(kernel.value("new Promise(r => setTimeout(() => r({a: 1}), 20))"), "{ a: 1 }")
        self.assertEqual(outcome(kernel.run("(async () => {})()")), "ok")
        for code, value in (("Promise.reject(new TypeError('no'))", "no"), ("Promise.reject()", "rejected")):
            events = kernel.run(code)
            self.assertEqual(([e["value"] for e in errors(events)], outcome(events)), ([value], "error"))
        self.assertEqual(kernel.value("1"), "1")

    def test_output_is_heard(self):
        kernel = self.own()
        kernel.run("console.log('grün', {a: 1}); console.error('oh'); process.stdout.write('raw')")
        self.assertEqual(kernel.output(until="raw"), "grün { a: 1 }\nraw")
        self.assertEqual(kernel.output("err", until="oh\n"), "oh\n")

    def test_errors_are_told(self):
        for code, name, value in (("throw new RangeError('far')", "RangeError", "far"), ("nothing", "ReferenceError", "nothing is not defined"),
                                  ("throw 'text'", "Error", "'text'"), ("function (", "SyntaxError", None), ("let a b", "SyntaxError", None),
                                  ("setTimeout(() => { throw new Error('late') }, 5); await new Promise(r => setTimeout(r, 5000))", "Error", "late")):
            events = self.kernel.run(code)
            found = errors(events)
            self.assertEqual((len(found), outcome(events)), (1, "error"), code)
            self.assertEqual(found[0]["name"], name, code)
            if value is not None:
                self.assertEqual(found[0]["value"], value)
            self.assertNotIn("node.js", "\n".join(found[0]["traceback"]))
        self.assertEqual(self.kernel.value("1"), "1")

    def test_a_rejection_that_nobody_hears_harms_nothing(self):
        kernel = self.own()
        self.assertEqual(outcome(kernel.run("Promise.reject(new Error('unheard')); 3")), "ok")
        self.assertEqual(kernel.value("4"), "4")

    def test_imports_work(self):
        kernel = self.own()
        code = ("import fs from 'fs'\nimport path, { join as j, basename } from \"path\";\nimport * as os from 'node:os'\nimport 'util'\n"
                "[typeof fs.readFileSync, j('a', 'b'), basename('/x/y'), path.sep, typeof os.cpus].join()")
        self.assertEqual(kernel.value(code), "'function,a/b,y,/,function'")
        self.assertEqual(kernel.value("j('c', 'd') + typeof require('fs').statSync + typeof (await import('path')).join"), "'c/dfunctionfunction'")
        self.assertEqual(kernel.value("await 1; `\nimport a from 'b'`"), '"\\nimport a from \'b\'"')

    def test_a_cell_can_be_run_again(self):
        kernel = self.own()
        cell = ("const fs = require('fs'), { join: j, ...rest } = require('path')\nlet n, m = 1\nclass A { v() { return m } }\n"
                "const crypto = require('crypto')\nasync function f() { const n = 5; return n }\nn = (n ?? 0) + await f();\n"
                "[n, new A().v(), typeof crypto.createHash, typeof rest.sep].join()")
        for _ in range(2):
            self.assertEqual(kernel.value(cell), "'5,1,function,string'")
        self.assertEqual(kernel.value("const { a = 3, b: [c] } = { b: [4] }; export const d = 5; a + c + d"), "12")
        self.assertEqual(kernel.value("export default class {}\n6"), "6")
        self.assertEqual(kernel.value("for (const i of [1]) { let q = i }; typeof q + typeof i"), "'undefinedundefined'")

    def test_environment_and_directory_of_a_cell(self):
        kernel = self.own(env=dict(os.environ, HAVE="1"), cwd="/usr")
        code = "[process.env.HAVE, process.env.MORE, process.cwd()].join()"
        self.assertEqual(kernel.value(code, env={"HAVE": "2", "MORE": "3"}, cwd="/tmp"), "'2,3,/tmp'")
        self.assertEqual(kernel.value(code), "'1,,/usr'")

    def test_an_interrupt_ends_the_cell_and_keeps_the_state(self):
        kernel = self.own()
        kernel.run("const kept = 1")
        for code in ("console.log('go'); while (true) {}", "console.log('go'); await new Promise(() => {})",
                     "console.log('go'); setInterval(() => {}, 10); await new Promise(() => {})"):
            before = kernel.output().count("go")
            kernel.send(dict(id="1", code=code))
            while kernel.output().count("go") == before:
                pass
            events = self.insist(kernel)
            self.assertEqual((outcome(events), errors(events)[0]["name"]), ("interrupted", "KeyboardInterrupt"), code)
            self.assertEqual(kernel.value("kept"), "1")

    def insist(self, kernel):
        """Interrupt as the agent does: Node may miss one that comes when a cell begins to wait."""
        over = threading.Event()

        def interrupt():
            kernel.interrupt()
            while not over.wait(3):
                kernel.interrupt()

        patience = threading.Thread(target=interrupt)
        patience.start()
        try:
            return kernel.finish()
        finally:
            over.set()
            patience.join()

    def test_values_are_json_when_that_is_wanted(self):
        data = results(self.kernel.run("({a: [1, null, 'é']})", rich=True))[0]["data"]
        self.assertEqual(data["application/json"], {"a": [1, None, "é"]})
        for code in ("7", "'x'", "new Map()", "const loop = {}; loop.self = loop; loop", "[1n]"):
            self.assertEqual(results(self.kernel.run(code, rich=True))[0]["data"].keys(), {"text/plain"}, code)

    def test_things_can_be_displayed(self):
        shown = results(self.kernel.run("display({a: 1}, 2); $$.html('<b>'); $$.png('aGk=')"))
        self.assertEqual([r["data"] for r in shown], [{"text/plain": "{ a: 1 }"}, {"text/plain": "2"}, {"text/html": "<b>"}, {"image/png": "aGk="}])

    def test_a_large_value_is_replaced_by_a_note(self):
        shown = results(self.kernel.run("$$.html('x'.repeat(9000000))"))
        self.assertIn("left out", shown[0]["data"]["text/plain"])

    def test_exit_ends_the_kernel(self):
        kernel = self.own()
        with self.assertRaises(Died):
            kernel.run("process.exit(3)")
        self.assertEqual(kernel.wait(), 3)

    def test_the_kernel_ends_with_its_socket(self):
        kernel = self.own()
        kernel.sock.close()
        self.assertEqual(kernel.wait(), 0)


class TypeScript(unittest.TestCase):
    def setUp(self):
        self.kernel = start("typescript")
        self.addCleanup(self.kernel.close)

    @unittest.skipIf(version() < (22, 13), "this Node knows no TypeScript")
    def test_types_are_taken_out(self):
        kernel = self.kernel
        kernel.run("interface P { x: number }\ntype T = P | null\nenum E { A = 4, B }\nconst p: P = { x: 1 }\nexport function sub(a: number, b?: number): number { return a - (b ?? 0) }")
        self.assertEqual(kernel.value("sub(p.x as number, 2) + E.B"), "4")
        self.assertEqual(kernel.value("import type { Stats } from 'fs'\nimport { join } from 'path'\njoin(<string>'a', 'b')"), "'a/b'")
        self.assertEqual(kernel.value("const v: number[] = await Promise.resolve([1]); v!.length"), "1")
        self.assertEqual(errors(kernel.run("const q: = 1"))[0]["name"], "SyntaxError")

    @unittest.skipIf(version() >= (22, 13), "this Node knows TypeScript")
    def test_a_node_without_typescript_says_so(self):
        found = errors(self.kernel.run("const p: number = 1", env={"NODE_PATH": ""}))
        self.assertIn("TypeScript needs Node 22.13", found[0]["value"])


if __name__ == "__main__":
    unittest.main(verbosity=2)

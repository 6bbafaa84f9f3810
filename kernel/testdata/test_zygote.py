"""Claims about the zygote and the kernels it forks into sandboxes. Needs root: it plays the maker."""

import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peer  # noqa: E402
from peer import Failed, Maker, Sandbox  # noqa: E402

PYTHON = os.environ.get("COVE_TEST_PYTHON") or sys.executable
WAY = os.environ.get("COVE_TEST_WAY", "shim")  # or "python": without the shim
PRELOAD = ["numpy", "pandas", "matplotlib.pyplot", "random", "uuid", "tempfile", "multiprocessing", "no_such_module"]


def setUpModule():
    peer.private_mounts(*peer.prefixes(PYTHON), peer.KERNEL_DIR)
    os.mkdir("/tmp/home")
    os.environ["COVE_SECRET"] = "of the host"


def wanted(**more):
    return dict(tune=dict(more.pop("tune", {}), shim=WAY == "shim"), **more)


class Claims(unittest.TestCase):
    preload = ()

    @classmethod
    def setUpClass(cls):
        cls.maker = Maker(PYTHON, preload=cls.preload, **wanted())

    @classmethod
    def tearDownClass(cls):
        cls.maker.close()

    def sandbox(self):
        sandbox = Sandbox()
        self.addCleanup(sandbox.kill)
        return sandbox

    def fork(self, sandbox=None, maker=None, **more):
        kernel = (maker or self.maker).fork(sandbox or self.sandbox(), **more)
        self.addCleanup(os.close, kernel.pidfd)
        self.addCleanup(kernel.close)
        return kernel

    def zygote(self, **options):
        maker = Maker(PYTHON, **wanted(**options))
        self.addCleanup(maker.close)
        return maker


class Birth(Claims):
    def test_a_child_lives_in_all_namespaces_of_its_sandbox(self):
        sandbox = self.sandbox()
        kernel = self.fork(sandbox)
        for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            with self.subTest(name):
                self.assertEqual(os.readlink("/proc/%d/ns/%s" % (kernel.pid, name)), os.readlink("/proc/%d/ns/%s" % (sandbox.pid, name)))
                if name != "cgroup":
                    self.assertNotEqual(os.readlink("/proc/%d/ns/%s" % (kernel.pid, name)), os.readlink("/proc/self/ns/" + name))

    def test_a_child_is_who_it_was_told_to_be_and_can_do_nothing_more(self):
        kernel = self.fork(groups=[1000, 27])
        status = dict(line.split(":\t", 1) for line in kernel.json("open('/proc/self/status').read()").splitlines() if ":\t" in line)
        self.assertEqual(status["Uid"], "1000\t1000\t1000\t1000")
        self.assertEqual(status["Gid"], "1000\t1000\t1000\t1000")
        self.assertEqual(sorted(status["Groups"].split()), ["1000", "27"])
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            self.assertEqual(int(status[name], 16), 0, name)
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"]), ("1", "2", "2"))
        self.assertEqual((status["Umask"], status["Threads"]), ("0022", "1"))
        self.assertEqual([status[s].strip("0") for s in ("SigBlk", "SigPnd")], ["", ""])

    def test_what_was_expected_need_not_be_told_again(self):
        expected = {"expected": True, "env": {"HOME": "/tmp/home", "PATH": "/usr/bin:/bin", "WHO": "expected"}}
        for birth, want in (
            ({"same": True}, ["expected", "/usr/bin:/bin", 4096]),
            ({"open_files": 300, "same": True}, ["expected", "/usr/bin:/bin", 300]),
            ({"open_files": 9000, "same": True}, ["expected", "/usr/bin:/bin", 4096]),  # not more than it has
            ({"same": True, "open_files": 300}, ["expected", "/usr/bin:/bin", 300]),  # in an order that only Python reads
            ({"env": {"HOME": "/tmp/home", "WHO": "other"}, "open_files": 301}, ["other", None, 301]),
        ):
            with self.subTest(birth):
                kernel = self.fork(ahead=True, births=[expected, birth])
                self.assertRegex(kernel.ready["message"], r"^ipython ")
                self.assertEqual(kernel.ready["pid"], kernel.json("os.getpid()", "import os"))
                self.assertEqual(kernel.json("[os.environ.get('WHO'), os.environ.get('PATH'), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]",
                                             "import os, resource"), want)
                self.assertEqual(kernel.json("os.stat('/proc/self').st_uid", "import os"), 1000)  # it can be looked at: dumpable

    def test_a_request_may_come_right_behind_a_birth(self):
        kernel = self.maker.order(self.sandbox(), ahead=True, births=[{"expected": True, "env": {}}, {"same": True}])
        self.addCleanup(kernel.close)
        kernel.send({"code": "6*7"})
        self.assertEqual(kernel.event()["type"], "ready")
        self.assertEqual([e["result"]["data"]["text/plain"] for e in kernel.finish() if e["type"] == "result"], ["42"])
        for fd in self.maker.expect("forked", kernel.token)[1]:
            os.close(fd)

    def test_the_delta_filter_holds(self):
        kernel = self.fork()
        self.assertEqual(kernel.json("[(_l.setns(0, 0), _c.get_errno()), (_l.syscall(435, 0, 0), _c.get_errno())]",
                                     "import ctypes as _c; _l = _c.CDLL(None, use_errno=True)"), [[-1, 1], [-1, 38]])

    def test_only_its_own_descriptors_are_open(self):
        kernel = self.fork()
        found = kernel.json("{f: _o.readlink('/proc/self/fd/' + f) for f in _o.listdir('/proc/self/fd') if _o.path.lexists('/proc/self/fd/' + f)}",
                            "import os as _o")
        found = {int(f): target for f, target in found.items() if not target.startswith("/proc/")}
        low = {f: t for f, t in found.items() if f < 10}
        self.assertEqual(sorted(low), [0, 1, 2])
        self.assertEqual(low[0], "/dev/null")
        high = sorted(t.split(":")[0] for f, t in found.items() if f >= 10)
        self.assertEqual(high, ["pipe", "pipe", "socket"])
        self.assertEqual({t for f, t in found.items() if f >= 10 and t.startswith("pipe")}, {low[1], low[2]})

    def test_the_environment_is_the_one_ordered_and_nothing_of_host_or_zygote(self):
        self.assertEqual(self.fork(env={"A": "b", "HOME": "/tmp/home"}).json("dict(__import__('os').environ)"),
                         {"A": "b", "HOME": "/tmp/home"})
        out = self.fork(env={"A": "b"})
        out.run("!/usr/bin/env")
        seen = out.output(until="A=b")
        self.assertNotIn("SECRET", seen)
        self.assertNotIn("THREADS", seen)
        self.assertNotIn("SECRET", subprocess.run(["strings", "/proc/%d/environ" % out.pid], capture_output=True, text=True).stdout)

    def test_session_folder_and_limit_are_its_own(self):
        kernel = self.fork(nofile=777, cwd="/usr")
        self.assertEqual(kernel.json("[_o.getcwd(), _o.getsid(0) == _o.getpid(), _r.getrlimit(_r.RLIMIT_NOFILE)]",
                                     "import os as _o, resource as _r"), ["/usr", True, [777, 777]])
        self.assertEqual(self.fork(cwd="/no/such").json("__import__('os').getcwd()"), "/")

    def test_signals_are_as_a_new_process_has_them(self):
        kernel = self.fork()
        self.assertEqual(kernel.json("[_s.getsignal(n) == _s.SIG_DFL for n in (_s.SIGCHLD, _s.SIGTERM, _s.SIGHUP)] + [_s.set_wakeup_fd(-1)]",
                                     "import signal as _s"), [True, True, True, -1])
        kernel.run("import time")
        kernel.send({"code": "print('go', flush=True); time.sleep(3600)"})
        kernel.output(until="go")
        os.kill(kernel.pid, signal.SIGINT)
        self.assertEqual(kernel.finish()[-1]["end"]["outcome"], "interrupted")

    def test_the_child_may_look_into_itself_and_is_cut_off_from_its_parent(self):
        kernel = self.fork()
        self.assertEqual(kernel.json("[len(_o.listdir('/proc/self/fd')) > 3, _o.getppid()]", "import os as _o"), [True, 0])
        self.assertEqual(kernel.ready["pid"], kernel.json("__import__('os').getpid()"))
        self.assertIn(kernel.ready["message"].split()[0], ("ipython", "plain"))

    def test_the_zygote_itself_cannot_be_looked_into(self):
        # Owned by root: what is not dumpable shows its descriptors and memory to nobody of its own uid.
        self.assertEqual(os.stat("/proc/%d/fd" % self.maker.pid).st_uid, 0)

    def test_subprocesses_threads_and_pools_work(self):
        kernel = self.fork()
        self.assertEqual(kernel.value("import subprocess; subprocess.run(['/bin/echo', 'x'], capture_output=True).stdout"), "b'x\\n'")
        self.assertEqual(kernel.value("import threading; t = threading.Thread(target=lambda: None); t.start(); t.join(); threading.active_count()"), "1")
        self.assertEqual(kernel.value("import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as p: r = p.map(abs, [-1, -2])\nr"), "[1, 2]")
        self.assertEqual(kernel.value("import os, threading; threading.get_native_id() == os.getpid()"), "True")

    def test_the_first_cell_is_number_one_and_nothing_of_the_rehearsal_is_left(self):
        kernel = self.fork()
        self.assertEqual(kernel.run("1")[0]["count"], 1)
        names = kernel.json("[n for n in dir() if not n.startswith('_')]")
        self.assertEqual(sorted(set(names) - {"In", "Out", "exit", "quit", "get_ipython", "open", "display", "update_display", "clear_output"}), [])
        self.assertEqual(kernel.value("len(Out), len(In) - 1"), "(2, 3)")

    def test_cgroups_are_joined(self):
        folder = "/sys/fs/cgroup/pids/cove-kernel-test-%d" % os.getpid()
        try:
            os.mkdir(folder)
        except OSError as e:
            folder = "/sys/fs/cgroup/cove-kernel-test-%d" % os.getpid()
            try:
                os.mkdir(folder)
            except OSError:
                self.skipTest("no cgroup can be made here: %s" % e)
        fd = os.open(folder + "/cgroup.procs", os.O_WRONLY)
        try:
            sandbox = self.sandbox()
            kernel = self.fork(sandbox, cgroups=[fd])
            with open(folder + "/cgroup.procs") as f:
                joined = f.read().split()
            self.assertIn(str(kernel.pid), joined)
            self.assertEqual(len(joined), 1 if kernel.anchor is None else 2)
            kernel.end_anchor()
            sandbox.kill()
            self.maker.expect("exit", kernel.token)
        finally:
            os.close(fd)
            for _ in range(2000):
                try:
                    os.rmdir(folder)
                    break
                except OSError:
                    time.sleep(0.01)

    def test_a_cgroup_that_cannot_be_joined_ends_the_child_with_a_reason(self):
        null = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, null)
        kernel = self.maker.order(self.sandbox(), cgroups=[null])
        self.addCleanup(kernel.close)
        if self.maker.ready["way"] == "shim":  # the anchor finds out, before there is a kernel
            with self.assertRaisesRegex(Failed, "cgroup"):
                self.maker.expect("forked", kernel.token)
            return
        message, fds = self.maker.expect("exit", kernel.token)
        self.assertEqual(message["code"], 71)
        self.assertIn("kernel: ", kernel.output("err", until="\n"))
        _, fds = self.maker.expect("forked", kernel.token)
        os.close(fds[0])


class Death(Claims):
    def test_how_a_child_ended_is_told(self):
        for code, expected in (("exit()", {"code": 0}), ("exit(7)", {"code": 7}),
                               ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {"code": -1, "signal": "SIGKILL"}),
                               ("import os; os.kill(os.getpid(), 40)", {"code": -1, "signal": "signal 40"}),
                               ("import ctypes; ctypes.string_at(0)", {"code": -1, "signal": "SIGSEGV"})):
            with self.subTest(code):
                kernel = self.fork()
                kernel.send({"code": code})
                message, _ = self.maker.expect("exit", kernel.token)
                self.assertEqual(message, dict(type="exit", token=kernel.token, **expected))

    def test_a_closed_socket_ends_the_child(self):
        kernel = self.fork()
        kernel.sock.shutdown(1)
        self.assertEqual(self.maker.expect("exit", kernel.token)[0]["code"], 0)

    def test_the_end_of_pid_1_is_the_end_of_the_kernel_and_it_is_reaped_at_once(self):
        sandbox = self.sandbox()
        kernel = self.fork(sandbox)
        start = time.monotonic()
        sandbox.kill()
        self.assertEqual(self.maker.expect("exit", kernel.token)[0]["signal"], "SIGKILL")
        self.assertLess(time.monotonic() - start, 15)
        self.assertFalse(os.path.exists("/proc/%d" % kernel.pid))

    def test_the_zygote_is_the_parent(self):
        kernel = self.fork()
        with open("/proc/%d/stat" % kernel.pid) as f:
            self.assertEqual(int(f.read().rpartition(")")[2].split()[1]), self.maker.pid)

    def test_no_zombies_are_left(self):
        for _ in range(3):
            kernel = self.fork()
            kernel.send({"code": "exit()"})
            self.maker.expect("exit", kernel.token)
            kernel.end_anchor()
        deadline = time.monotonic() + 60
        while True:
            self.maker.tell({"op": "stats"})
            stats, _ = self.maker.expect("stats")
            with open("/proc/%d/task/%d/children" % (self.maker.pid, self.maker.pid)) as f:
                left = len(f.read().split())
            if left == stats["children"] or time.monotonic() > deadline:
                break
        self.assertEqual(left, stats["children"])

    def test_a_child_is_known_by_the_token_that_it_was_given_last(self):
        if self.maker.ready["way"] != "shim":
            self.skipTest("only kernels of the shim have branches, which are adopted")
        kernel = self.fork()
        self.maker.adopt(kernel.pid, "another")
        kernel.send({"code": "exit(3)"})
        self.assertEqual(self.maker.expect("exit", "another")[0]["code"], 3)

    def test_the_end_of_a_child_that_is_adopted_too_late_is_told(self):
        if self.maker.ready["way"] != "shim":
            self.skipTest("only kernels of the shim have branches, which are adopted")
        kernel = self.fork()
        with open("/proc/self/fdinfo/%d" % kernel.anchor) as f:
            anchor = int(f.read().split("\nPid:")[1].split()[0])  # a child of the zygote's that it knows no token of
        kernel.end_anchor()
        while os.path.exists("/proc/%d" % anchor):
            time.sleep(0.001)
        self.maker.adopt(anchor, "late")
        self.assertEqual(self.maker.expect("exit", "late")[0], {"type": "exit", "token": "late", "code": -1, "signal": "SIGKILL"})
        self.maker.adopt(anchor, "later")  # it was told, and is forgotten
        self.assertEqual(self.maker.expect("exit", "later")[0], {"type": "exit", "token": "later", "code": 0})
        for token in ("", 'x","code":7', "x" * 64):
            self.maker.adopt(kernel.pid, token)
            with self.assertRaisesRegex(Failed, "the token is none"):
                self.maker.expect("exit", "")

    def test_the_pidfd_is_the_childs(self):
        kernel = self.fork()
        with open("/proc/self/fdinfo/%d" % kernel.pidfd) as f:
            self.assertIn("Pid:\t%d\n" % kernel.pid, f.read())


class Orders(Claims):
    def test_what_cannot_be_done_is_told_and_forgotten(self):
        dead = Sandbox()
        pidfd = os.dup(dead.pidfd)
        dead.kill()
        self.addCleanup(os.close, pidfd)
        before = self.descriptors()

        class Gone:
            pass

        gone = Gone()
        gone.pidfd = pidfd
        kernel = self.maker.order(gone)
        with self.assertRaises(Failed):
            self.maker.expect("forked", kernel.token)
        kernel.close()
        for message in (b"{", b"[]", {"op": "nonsense", "token": "x"}, {"op": "fork", "token": "y"}):
            self.maker.tell(message)
            with self.assertRaises(Failed):
                self.maker.expect("forked", message.get("token", "") if isinstance(message, dict) else "")
        if self.maker.ready["way"] == "shim":
            self.refuse_short_orders()
        self.assertEqual(self.descriptors(), before)
        self.assertEqual(self.fork().value("1"), "1")

    def refuse_short_orders(self):
        whole = dict(op="fork", token="z", uid=1000, gid=1000, groups=[1000], cwd="/", nofile=0)
        null = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, null)
        for why, token, order, descriptors in (
                ("cut off", "", b"F", 4),
                ("cut off", "", b"F" + bytes(14), 4),
                ("cut off", "", peer.short_order(**dict(whole, cwd=""))[:-1], 4),
                ("token is none", "", peer.short_order(**dict(whole, token="")), 4),
                ("a long one", "", peer.short_order(**dict(whole, token="z" * 64)), 4),
                ("letters and digits", "", peer.short_order(**dict(whole, token='z","type":"forked')), 4),
                ("too many groups", "z", peer.short_order(**dict(whole, groups=[1000] * 65)), 4),
                ("number of descriptors", "z", peer.short_order(**whole), 0),
                ("number of descriptors", "z", peer.short_order(**whole), 3),
                ("number of descriptors", "z", peer.short_order(**whole), 13),
                ("whole", "z", peer.short_order(**dict(whole, cwd="/" * 8192)), 4),
                ("whole", "z", peer.short_order(**whole), 17),
                ("token is none", "", b"A", 4),
                ("token is none", "", b"A" + bytes(7), 0),
                ("token is none", "", b"A" + bytes(7) + b"z" * 9000, 4),
                ("setns", "z", peer.short_order(**whole), 4)):
            with self.subTest(why):
                self.maker.tell(order, [null] * descriptors)
                with self.assertRaisesRegex(Failed, why):
                    self.maker.expect("forked", token)

    def descriptors(self):
        self.maker.tell({"op": "stats"})  # what was asked before is done once this is answered
        self.maker.expect("stats")
        return sorted(os.listdir("/proc/%d/fd" % self.maker.pid))

    def test_forks_leave_no_descriptors_behind(self):
        self.fork()
        before = self.descriptors()
        for _ in range(5):
            self.fork()
        self.assertEqual(self.descriptors(), before)

    def test_the_floor_is_a_plain_fork(self):
        kernel = self.maker.floor()
        self.assertEqual(kernel.event()["type"], "ready")
        self.assertEqual(kernel.value("import os; os.getuid()"), str(peer.ZYGOTE_UID))
        born, pidfds = self.maker.expect("forked", kernel.token)
        for fd in pidfds:
            os.close(fd)
        kernel.close()
        while os.path.exists("/proc/%d" % born["pid"]):  # nobody is told, and it is reaped
            time.sleep(0.001)

    def test_stats_count(self):
        self.maker.tell({"op": "stats"})
        stats, _ = self.maker.expect("stats")
        self.assertEqual(stats["threads"], 1)
        kernel = self.fork(ahead=True)
        self.assertEqual(kernel.value("1+1"), "2")
        self.maker.tell({"op": "stats"})
        self.assertEqual(self.maker.expect("stats")[0]["children"], stats["children"] + 1)
        kernel.send({"code": "exit()"})
        self.maker.expect("exit", kernel.token)
        self.maker.tell({"op": "stats"})
        self.assertEqual(self.maker.expect("stats")[0]["children"], stats["children"])
        self.assertGreater(stats["rss_kb"], 1000)

    def test_many_orders_at_once_are_all_served(self):
        sandboxes = [self.sandbox() for _ in range(6)]
        kernels = [self.maker.order(s) for s in sandboxes]
        for kernel in kernels:
            self.addCleanup(kernel.close)
            self.assertEqual(kernel.event()["type"], "ready")
            os.close(self.maker.expect("forked", kernel.token)[1][0])

    def test_the_zygote_ends_when_its_maker_does(self):
        maker = Maker(PYTHON, **wanted())
        maker.control.close()
        self.assertEqual(os.waitpid(maker.pid, 0)[1], 0)

    def test_a_zygote_with_a_second_thread_refuses(self):
        maker = self.zygote(warmup="import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
        self.assertEqual((maker.ready["type"], maker.ready["token"]), ("failed", ""))
        self.assertIn("2 threads", maker.ready["error"])
        with self.assertRaises(EOFError):
            maker.hear()

    def test_a_broken_warm_up_is_told_and_not_fatal(self):
        maker = self.zygote(warmup="1/0")
        self.assertEqual(maker.ready["imports"]["(warmup)"], "ZeroDivisionError: division by zero")
        self.assertEqual(self.fork(maker=maker).value("1"), "1")

    def test_without_a_shim_on_disk_python_does_it(self):
        folder = "/tmp/no-shim-%d" % os.getpid()
        os.mkdir(folder)
        for name in ("kernel.py", "zygote.py"):
            shutil.copy(os.path.join(peer.KERNEL_DIR, name), folder)
        maker = self.zygote(kernel_dir=folder)
        self.assertEqual(maker.ready["way"], "python")
        self.assertEqual(self.fork(maker=maker).value("1"), "1")


class Preloaded(Claims):
    preload = PRELOAD

    def test_ready_tells_what_was_imported(self):
        ready = self.maker.ready
        self.assertEqual((ready["type"], ready["threads"], ready["way"]), ("ready", 1, WAY))
        self.assertIn("ModuleNotFoundError", ready["imports"]["no_such_module"])
        for name in PRELOAD[:-1]:
            self.assertIsInstance(ready["imports"][name], float, name)
        self.assertRegex(ready["python"], r"^3\.\d+\.\d+")
        self.assertGreater(ready["rss_kb"], 10000)

    def test_siblings_share_no_random_numbers(self):
        draw = ("import ssl, random, uuid, os, tempfile, numpy as np, secrets, multiprocessing.process as mpp\n"
                "_d = [ssl.RAND_bytes(16).hex(), random.random(), np.random.rand(), str(uuid.uuid4()), str(uuid.uuid1()), uuid.getnode(),\n"
                "  os.urandom(8).hex(), next(tempfile._get_candidate_names()), secrets.token_hex(8),\n"
                "  np.random.default_rng().random(), bytes(mpp.current_process().authkey).hex(), random.SystemRandom().random()]")
        kernels = [self.fork() for _ in range(3)]
        self.assertEqual(len({k.ready["pid"] for k in kernels}), 1, "the test needs siblings of equal pid")
        drawn = [k.json("_d", draw) for k in kernels]
        for one in zip(*drawn):
            self.assertEqual(len(set(one)), len(kernels), one)

    def test_siblings_share_no_state(self):
        one, two = self.fork(), self.fork()
        one.run("import numpy as np; np.cove_mark = 1; mine = 1")
        self.assertEqual(two.value("import numpy as np; hasattr(np, 'cove_mark'), 'mine' in globals()"), "(False, False)")

    def test_temporary_files_are_where_the_child_wants_them(self):
        kernel = self.fork(env={"HOME": "/tmp/home", "TMPDIR": "/tmp/home"})
        self.assertEqual(kernel.value("import tempfile; tempfile.gettempdir()"), "'/tmp/home'")

    def test_libraries_know_the_childs_home(self):
        self.assertEqual(self.fork().value("import matplotlib; matplotlib.get_configdir().startswith('/tmp/home')"), "True")

    def test_data_frames_and_figures_work(self):
        kernel = self.fork()
        events = kernel.run("import pandas as pd, numpy as np, matplotlib.pyplot as plt\n"
                            "df = pd.DataFrame({'k': [1, 1, 2], 'v': [1.0, 2.0, 3.0]})\nplt.plot(df.v)\ndf.groupby('k').v.sum()")
        shown = [e["result"]["data"] for e in events if e["type"] == "result"]
        self.assertIn("3.0", shown[0]["text/plain"])
        self.assertIn("image/png", shown[1])
        self.assertEqual(kernel.run("df.describe()")[-1]["end"]["outcome"], "ok")

    def test_memory_is_given_back_and_collection_works(self):
        kernel = self.fork()
        self.assertEqual(kernel.value(
            "import gc, weakref, numpy as np, pandas as pd\nclass A: pass\na = A(); a.me = a; w = weakref.ref(a); del a; gc.collect()\n"
            "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
            "def work():\n    for i in range(10):\n        d = pd.DataFrame(np.random.rand(200000, 4)); d.groupby((d[0] * 10).astype(int)).mean()\n"
            "work(); before = rss(); work(); gc.collect()\nw() is None, gc.isenabled(), rss() - before < 30 << 20"), "(True, True, True)")

    def test_locks_taken_by_libraries_are_free(self):
        kernel = self.fork()
        self.assertEqual(kernel.value("import logging, threading, warnings\nlogging.warning('x'); warnings.warn('y')\n"
                                      "import importlib, colorsys\nimportlib.reload(colorsys); threading.Lock().acquire(False)"), "True")

    def test_threads_may_be_raised_again(self):
        kernel = self.fork()
        self.assertEqual(kernel.value("import numpy as np; float((np.ones((300, 300)) @ np.ones((300, 300))).sum())"), "27000000.0")

    def test_code_that_every_kernel_runs_lies_together(self):
        # It is written to while it runs, so what counts is on how many pages it is.
        def pages(kernel):
            kernel.run("import sys; seen = set(); note = seen.add; sys.setprofile(lambda frame, event, _: note(id(frame.f_code)))")
            kernel.run("import pandas as pd\npd.DataFrame({'a': [1, 2]}).sum()")
            return int(kernel.value("sys.setprofile(None); len({address >> 12 for address in seen})"))

        with_it, without = self.zygote(preload=["pandas"]), self.zygote(preload=["pandas"], tune={"pack": False})
        self.assertEqual(without.ready["packed"], 0)
        if self.fork(maker=with_it).value("import sys; sys.version_info >= (3, 11)") == "False":
            self.skipTest("code is not written to before Python 3.11")
        self.assertGreater(with_it.ready["packed"], 200)
        together, apart = pages(self.fork(maker=with_it)), pages(self.fork(maker=without))
        self.assertLess(together, 0.8 * apart)

    def test_libraries_are_few_mappings(self):
        count = "len([l for l in open('/proc/self/maps') if '.so' in l])"
        joined, apart = self.zygote(preload=["pandas"]), self.zygote(preload=["pandas"], tune={"join": False})
        self.assertEqual(apart.ready["joined"], 0)
        self.assertGreater(joined.ready["joined"], 100)
        one, other = self.fork(maker=joined), self.fork(maker=apart)
        self.assertLess(int(one.value(count)), 0.6 * int(other.value(count)))
        # Nothing became both writable and executable, and what is written to still belongs to one process.
        self.assertEqual(one.value("[l for l in open('/proc/self/maps') if 'rwx' in l]"), "[]")
        self.assertEqual(one.value("import pandas as pd; int(pd.DataFrame({'a': [1, 2]}).a.sum())"), "3")

    def test_each_optimisation_can_be_left_out(self):
        for name in ("freeze", "warmup", "pack", "join", "fill", "immortal", "arena", "collapse"):
            with self.subTest(name):
                maker = self.zygote(preload=["numpy"], tune={name: False})
                self.assertEqual(maker.ready["type"], "ready", maker.ready)
                kernel = self.fork(maker=maker)
                self.assertEqual(kernel.value("import numpy as np; int(np.arange(5).sum())"), "10")


del Claims

if __name__ == "__main__":
    unittest.main(verbosity=2)

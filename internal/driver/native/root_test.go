package native_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
)

// A kernel of a template whose user is root is uid 0 of its sandbox and has no capability, so it can do less than a command of
// root's, which has those that sudo gives.
func TestIsolationRootsKernelIsRefused(t *testing.T) {
	b := start(t, from(buildTemplate(t, "code-interpreter")))
	p := checkProbe(t, b.value(probe), true)
	if p.Info.UID != 0 {
		t.Errorf("a cell runs as uid %d", p.Info.UID)
	}
	const nothing = "0000000000000000"
	type caps struct{ Inh, Prm, Eff, Bnd, Amb, NoNewPrivs, Seccomp string }
	got := caps{p.Info.CapInh, p.Info.CapPrm, p.Info.CapEff, p.Info.CapBnd, p.Info.CapAmb, p.Info.NoNewPrivs, p.Info.Seccomp}
	if diff := cmp.Diff(caps{nothing, nothing, nothing, nothing, nothing, "1", "2"}, got); diff != "" {
		t.Error(diff)
	}
	for name, target := range p.Info.FDs {
		if !strings.HasPrefix(target, "/dev/null") && !strings.HasPrefix(target, "pipe:") && !strings.HasPrefix(target, "socket:") && !strings.HasPrefix(target, "/proc/") {
			t.Errorf("descriptor %s is %s", name, target)
		}
	}
	for claim, code := range map[string]string{
		"the agent's memory":       `open("/proc/1/mem", "rb")`,
		"the agent's environment":  `open("/proc/1/environ", "rb").read()`,
		"the agent's descriptors":  `import os; os.open("/proc/1/fd/3", os.O_RDONLY)`,
		"a kernel's setting":       `open("/proc/sys/kernel/hostname", "w").write("x")`,
		"what is hidden of proc":   `assert open("/proc/kcore", "rb").read(1)`,
		"what all sandboxes share": `open("/run/cove/kernel/kernel.py", "a")`,
		"a device":                 `import os; os.mknod("/tmp/disk", 0o600 | 0o060000, os.makedev(7, 0))`,
		"another owner":            `import os; open("/tmp/f", "w"); os.chown("/tmp/f", 1000, 1000)`,
		"another identity":         `import os; os.setuid(1000)`,
		"a new namespace":          `import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0`,
		"a program with rights":    `import subprocess; assert "0000000000000000" not in subprocess.run(["grep", "CapEff", "/proc/self/status"], capture_output=True, text=True).stdout`,
	} {
		if a := b.run(code); a.end.Outcome == agentapi.OutcomeOK {
			t.Errorf("root's kernel has %s", claim)
		}
	}
}

func TestRootsTemplateIsRootThroughout(t *testing.T) {
	b := start(t, from(buildTemplate(t, "code-interpreter")))
	const who = "import os, sys; print(os.getuid(), os.getgid(), os.getgroups(), os.environ['HOME'], os.environ['USER'], os.getcwd())"
	want := "0 0 [0] /root root /workspace"
	if got := b.value(who); got != want {
		t.Errorf("a kernel is %s, want %s", got, want)
	}
	for _, python := range []string{"python", "python3"} {
		if got := b.exec(agentapi.ExecParams{Argv: []string{python, "-c", who}}); strings.TrimSpace(got.stdout) != want {
			t.Errorf("a command of %s is %s%s, want %s", python, got.stdout, got.stderr, want)
		}
	}
	// What one of them makes is the other's to change.
	b.root("mkdir -m 755 made && echo 1 > made/file && chmod 644 made/file")
	b.value("open('made/file', 'a').write('2\\n'); open('made/more', 'w').write('3\\n'); open('/etc/motd', 'w').write('root')")
	if got := b.root("cat made/file made/more /etc/motd; stat -c '%U %a' made/more"); got != "1\n2\n3\nrootroot 644" {
		t.Errorf("a command sees %q", got)
	}
	if got := b.value("import warnings; warnings.simplefilter('error'); import matplotlib; print(os.path.relpath(matplotlib.get_configdir(), '/root'), os.path.exists(matplotlib.get_cachedir()))"); got != ".config/matplotlib True" {
		t.Errorf("matplotlib keeps its files at %s", got)
	}
}

func TestRootsKernelIsForked(t *testing.T) {
	b := start(t, from(buildTemplate(t, "code-interpreter")))
	b.value("x = 41; open('/root/of-parent', 'w').write('here')")
	children, _ := b.fork(2)
	for _, child := range children {
		const who = "import os; print(os.getuid(), os.getgid(), os.getgroups(), x + 1, open('/root/of-parent').read()); open('/root/of-parent', 'w').write('child')"
		if got := child.value(who); got != "0 0 [0] 42 here" {
			t.Errorf("a branch says %s", got)
		}
		p := checkProbe(t, child.value(probe), true)
		if p.Info.UID != 0 || p.Info.CapPrm != "0000000000000000" || p.Info.CapBnd != "0000000000000000" {
			t.Errorf("a branch is uid %d with capabilities %s, and may have %s", p.Info.UID, p.Info.CapPrm, p.Info.CapBnd)
		}
	}
	if got := b.value("print(open('/root/of-parent').read())"); got != "here" {
		t.Errorf("a branch changed its parent's file: %s", got)
	}
}

func TestRootAddsUsers(t *testing.T) {
	b := start(t, from(buildTemplate(t, "code-interpreter")))
	for _, line := range []string{"useradd -m -u 4000 one", "adduser --disabled-password --gecos '' two", "groupadd three && usermod -aG three two && echo two:word | chpasswd"} {
		if _, err := exec.LookPath(strings.Fields(line)[0]); err != nil {
			continue // a program of the host's, which this one lacks
		}
		b.root(line + " && id " + map[bool]string{true: "one", false: "two"}[strings.HasSuffix(line, "one")])
	}
}

// Programs that ask PAM: root needs no password, others have the one that root gave them.
func TestAccounts(t *testing.T) {
	b := start(t, from(buildTemplate(t, "base")))
	for _, c := range []struct{ line, says string }{
		{"su user -c 'id -un'", "user"},
		{"su - user -c 'pwd'", "/home/user"},
		{"runuser -u user -- id -un", "user"},
		{"runuser -l user -c 'id -un'", "user"},
		{"adduser --disabled-password --gecos '' alice >/dev/null && id -un alice && ls -d /home/alice", "alice\n/home/alice"},
		{"adduser --system --group daemonling >/dev/null && id -gn daemonling", "daemonling"},
		{"useradd -m bob && stat -c %U /home/bob", "bob"},
		{"echo bob:secret | chpasswd && passwd -S bob | cut -d' ' -f2 && grep -o '^bob:[$]6[$]' /etc/shadow", "P\nbob:$6$"},
		{"deluser alice >/dev/null && ! id alice 2>/dev/null", ""},
	} {
		if program := strings.Fields(c.line)[0]; program == "adduser" || program == "deluser" {
			if _, err := exec.LookPath(program); err != nil {
				continue // a program of the host's, which this one lacks
			}
		}
		got := b.exec(agentapi.ExecParams{Argv: []string{"/bin/bash", "-c", c.line}, User: "root"})
		if got.end.ExitCode != 0 || strings.TrimSpace(got.stdout) != c.says {
			t.Errorf("%s: exit %d, %q %q; want %q", c.line, got.end.ExitCode, got.stdout, got.stderr, c.says)
		}
	}
	// A user who is not root does not become one without a password.
	got := b.exec(agentapi.ExecParams{Argv: []string{"/bin/bash", "-c", "su root -c 'id -u' </dev/null"}, User: "user"})
	if got.end.ExitCode == 0 || strings.Contains(got.stdout, "0") {
		t.Errorf("su without a password: exit %d, %q %q", got.end.ExitCode, got.stdout, got.stderr)
	}
}

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

const plainName = "python3"

// plain is a process of this host in the template's files: no namespace, no limit.
func (p *peers) plain() *peer {
	return &peer{name: plainName, version: p.tmpl.Python.Version, command: func(_ string, argv []string) (*exec.Cmd, error) {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir, cmd.Env = p.tmpl.Workdir, p.environment()
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.root, Credential: &syscall.Credential{Uid: userID, Gid: userID}}
		return cmd, nil
	}}
}

// bubblewrap has namespaces of its own, also of the network, and no limits: it knows none.
func (p *peers) bubblewrap() *peer {
	x := &peer{name: "bwrap"}
	program, err := exec.LookPath("bwrap")
	if err != nil {
		x.skip = missing("bwrap", "bubblewrap")
		return x
	}
	x.version = version(program, "--version")
	x.command = func(_ string, argv []string) (*exec.Cmd, error) {
		args := []string{"--unshare-all", "--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox",
			"--ro-bind", p.root, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", p.tmpl.Workdir, "--clearenv"}
		for _, pair := range p.environment() {
			name, value, _ := strings.Cut(pair, "=")
			args = append(args, "--setenv", name, value)
		}
		return exec.Command(program, append(append(args, "--"), argv...)...), nil
	}
	return x
}

// oci is runc or crun with a bundle of the template's files, read-only, and the template's limits.
func (p *peers) oci(name string) *peer {
	x := &peer{name: name}
	program, err := exec.LookPath(name)
	if err != nil {
		x.skip = missing(name, name)
		return x
	}
	x.version = version(program, "--version")
	state := filepath.Join(p.dir, name)
	x.command = func(id string, argv []string) (*exec.Cmd, error) {
		bundle := filepath.Join(state, "bundle")
		if err := os.MkdirAll(bundle, 0o755); err != nil {
			return nil, err
		}
		text, err := json.Marshal(p.bundle(id, argv))
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o644); err != nil {
			return nil, err
		}
		return exec.Command(program, "--root", filepath.Join(state, "state"), "run", "--bundle", bundle, id), nil
	}
	return x
}

// object is JSON that needs no type.
type object = map[string]any

// bundle is what `runc spec` writes, with our files, process and limits in it.
func (p *peers) bundle(id string, argv []string) object {
	mount := func(target, kind string, options ...string) object {
		return object{"destination": target, "type": kind, "source": kind, "options": options}
	}
	namespaces := []object{}
	for _, kind := range []string{"pid", "network", "ipc", "uts", "mount"} {
		namespaces = append(namespaces, object{"type": kind})
	}
	l := p.limits()
	return object{
		"ociVersion": "1.0.2", "hostname": "sandbox",
		"root": object{"path": p.root, "readonly": true},
		"process": object{
			"args": argv, "cwd": p.tmpl.Workdir, "env": p.environment(), "noNewPrivileges": true,
			"user": object{"uid": userID, "gid": userID}, "capabilities": object{},
		},
		"mounts": []object{
			mount("/proc", "proc"),
			mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
			mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
			{"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
			mount("/tmp", "tmpfs", "nosuid", "nodev", "mode=1777"),
		},
		"linux": object{
			"cgroupsPath": "/" + id, "namespaces": namespaces,
			"maskedPaths":   []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/scsi"},
			"readonlyPaths": []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
			"resources": object{
				"memory": object{"limit": l.MemoryBytes}, "pids": object{"limit": l.Pids},
				"cpu": object{"quota": int64(l.CPUs * cpuPeriod), "period": int64(cpuPeriod)},
			},
		},
	}
}

// cpuPeriod is in microseconds.
const cpuPeriod = 100_000

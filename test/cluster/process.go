package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// part is one daemon.
type part struct {
	name  string
	args  []string // the program first
	limit time.Duration
	ready func(ctx context.Context) (bool, error)
}

// process names one run of a program: a number alone may belong to somebody else by now.
type process struct {
	pid   int
	since string // in ticks since the machine started
}

// start runs a part in the cluster's network and waits until it can be used. A part that runs already is left alone.
func (c *cluster) start(ctx context.Context, p part) error {
	if alive(c.recorded(p.name)) {
		return nil
	}
	log, err := os.OpenFile(c.path("log", p.name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	args := p.args
	if !c.bare {
		// nsenter and not `ip netns exec`, which would give it a /sys without cgroups. It executes the program in its own place.
		args = append([]string{"nsenter", "--net=/run/netns/" + namespace, "--"}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...) // outlives this command; down ends it by the number below
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, c.dir
	cmd.Env = append(os.Environ(), "PATH="+c.bin+":/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	run := process{pid: cmd.Process.Pid, since: startTime(cmd.Process.Pid)}
	if err := os.WriteFile(c.path("pid", p.name), fmt.Appendf(nil, "%d %s\n", run.pid, run.since), 0o644); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	err = until(ctx, p.limit, p.name, func(ctx context.Context) (bool, error) {
		if !alive(run) {
			return false, errStop{errors.New("it ended")}
		}
		return p.ready(ctx)
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, c.tail(p.name))
	}
	return nil
}

// end asks a part to end, and makes it when it does not.
func (c *cluster) end(ctx context.Context, name string, sig syscall.Signal, limit time.Duration) error {
	run := c.recorded(name)
	if alive(run) {
		_ = syscall.Kill(run.pid, sig) // it may end by itself meanwhile
		gone := func(context.Context) (bool, error) { return !alive(run), nil }
		if until(ctx, limit, name, gone) != nil {
			c.say("%s did not end by itself", name)
			_ = syscall.Kill(run.pid, syscall.SIGKILL)
			if err := until(ctx, 10*time.Second, name+" after SIGKILL", gone); err != nil {
				return err
			}
		}
	}
	return remove(c.path("pid", name))
}

// recorded is the process that was started under a name; the zero process if there is none.
func (c *cluster) recorded(name string) process {
	data, err := os.ReadFile(c.path("pid", name))
	if err != nil {
		return process{}
	}
	pid, since, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	n, err := strconv.Atoi(pid)
	if err != nil {
		return process{}
	}
	return process{pid: n, since: since}
}

func alive(p process) bool { return p.pid > 0 && p.since != "" && startTime(p.pid) == p.since }

// startTime is when a process began; empty when there is none or only its exit status is left.
func startTime(pid int) string {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return ""
	}
	// The name is in brackets and may hold anything; what follows the last one is numbers, the state first.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fields[19]
}

// tail is the end of a part's log, for whoever reads why it failed.
func (c *cluster) tail(name string) string {
	data, err := os.ReadFile(c.path("log", name+".log"))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return "the end of its log:\n  " + strings.Join(lines[max(0, len(lines)-15):], "\n  ")
}

// tell runs a program to its end and returns what it printed; a failure says what it complained about.
func tell(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(complaints.String()))
	}
	return out.String(), nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// process is a server that runs beside us.
type process struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	orders  *json.Encoder
	answers *json.Decoder
}

// launch starts a server and returns when it knows every Pod.
func launch(ctx context.Context, s setup) (p *process, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, serverCommand)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p = &process{cmd: cmd, in: in, orders: json.NewEncoder(in), answers: json.NewDecoder(out)}
	if err := p.orders.Encode(s); err != nil {
		return nil, errors.Join(err, p.end())
	}
	var first answer
	if err := p.answers.Decode(&first); err != nil {
		return nil, errors.Join(fmt.Errorf("server %s: %w", s.Name, err), p.end())
	}
	return p, nil
}

// ask gives an order and waits until it is done.
func (p *process) ask(o order) (a answer, err error) {
	if err := p.orders.Encode(o); err != nil {
		return a, err
	}
	err = p.answers.Decode(&a)
	return a, err
}

// end has a server leave; it lets go of what it leads first.
func (p *process) end() error {
	p.in.Close()
	return p.cmd.Wait()
}

// fleet is every server of a round.
type fleet []*process

// ask gives all of them an order at once; they share its starts and hands.
func (f fleet) ask(o order) (all []answer, err error) {
	all = make([]answer, len(f))
	failed := make(chan error, len(f))
	o.Starts, o.Hands = o.Starts/len(f), max(1, o.Hands/len(f))
	for i, p := range f {
		go func() {
			var err error
			all[i], err = p.ask(o)
			failed <- err
		}()
	}
	for range f {
		err = errors.Join(err, <-failed)
	}
	return all, err
}

func (f fleet) end() (err error) {
	for _, p := range f {
		err = errors.Join(err, p.end())
	}
	return err
}

// calm waits until no server hears news any more.
func (f fleet) calm(ctx context.Context) error {
	for {
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		all, err := f.ask(order{Hands: len(f)})
		if err != nil {
			return err
		}
		heard := int64(0)
		for _, a := range all {
			heard += a.WatchBytes
		}
		if heard == 0 {
			return nil
		}
	}
}

// cpu is what each part has used so far, in seconds.
type cpu struct{ api, etcd, servers float64 }

func (c cpu) since(before cpu) cpu {
	return cpu{c.api - before.api, c.etcd - before.etcd, c.servers - before.servers}
}

func (w *world) cpu(f fleet) (c cpu) {
	c.api, c.etcd = cpuOf(w.pid("kube-apiserver")), cpuOf(w.pid("etcd"))
	for _, p := range f {
		c.servers += cpuOf(p.cmd.Process.Pid)
	}
	return c
}

// pid is that of a part of the cluster.
func (w *world) pid(part string) int {
	text, err := os.ReadFile(filepath.Join(w.dir, "pid", part))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	n, _ := strconv.Atoi(first)
	return n
}

// ticks of /proc in a second, on every architecture that we build for.
const ticks = 100

func cpuOf(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticks
}

// resident is the memory of a process in bytes.
func resident(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}

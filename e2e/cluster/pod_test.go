package cluster_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// Sandboxes are Pods with limits and without a way out that nobody asked for.
func TestClusterS0_83SandboxesArePods(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 1})
	w.warm(1)
	sb := s.create(client.CreateRequest{Network: &client.Network{Mode: "none"}})
	says(t, sb, "id -u; cat /proc/1/comm; test -e /var/run/secrets && echo token || true", "1000\ncove-pod")
	outside := listen(t)
	if open := s.create(client.CreateRequest{}); !reaches(t, open, outside) {
		t.Fatal("a sandbox with a network does not reach the internet, so that the other tells nothing")
	}
	if reaches(t, sb, outside) {
		t.Error("a sandbox without a network reaches the internet")
	}
	out, err := sb.Run(t.Context(), client.RunRequest{Code: "import pandas as pd; int(pd.DataFrame({'a': [20, 22]}).a.sum())"})
	if err != nil || out.Text() != "42" {
		t.Fatalf("the cell says %+v, %v", out, err)
	}
	limits := w.kubectl("get", "pod", "-n", w.namespace, w.podOf(sb.ID), "-o", "jsonpath={.spec.containers[0].resources.limits.memory}")
	if limits != "256Mi" {
		t.Errorf("its memory is limited to %s", limits)
	}
	if err := sb.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.noOrphans(s)
}

// A claim takes a Pod that waits and is much faster than a Pod that is made.
func TestClusterS0_84AWarmPodIsClaimedAndReplaced(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 2})
	w.warm(2)
	waited := map[string]bool{}
	for _, p := range w.pods() {
		waited[p.Name] = true
	}
	began := time.Now()
	sb := s.create(client.CreateRequest{})
	says(t, sb, "echo hello", "hello")
	warm := time.Since(began)
	if !waited[w.podOf(sb.ID)] {
		t.Error("it did not take a Pod that waited")
	}
	w.warm(2) // the claimed one is replaced
	began = time.Now()
	cold := s.create(client.CreateRequest{Limits: &client.Limits{MemoryBytes: 200 << 20}}) // of other limits than those that wait
	says(t, cold, "echo hello", "hello")
	if took := time.Since(began); took < 5*warm {
		t.Errorf("a Pod that waited answered after %v, a new one after %v", warm, took)
	}
	if waited[w.podOf(cold.ID)] {
		t.Error("a Pod with other limits was taken")
	}
}

// Whoever deletes a claimed Pod is named as the cause, to whoever runs something in it and to whoever asks later.
func TestClusterADeletedPodIsTold(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 1})
	w.warm(1)
	sb := s.create(client.CreateRequest{})
	running := follow(t.Context(), sb, client.ExecRequest{Command: "while :; do echo tick; sleep 0.1; done"})
	running.line(t, 10*time.Second)
	w.kubectl("delete", "pod", "-n", w.namespace, w.podOf(sb.ID), "--wait=false")
	if err := running.end(t, time.Minute); err == nil {
		t.Error("the run that went on ended well")
	} else {
		t.Logf("the run ended with: %v", err)
	}
	if info := s.ended(sb.ID, time.Minute); info.Cause != "deleted" || !strings.Contains(info.Message, "deleted its Pod") {
		t.Errorf("it ended by %q: %s", info.Cause, info.Message)
	}
	if _, err := sb.Exec(t.Context(), client.ExecRequest{Command: "true"}); client.KindOf(err) != client.Gone || !strings.Contains(err.Error(), "deleted") {
		t.Errorf("a later command is told %v", err)
	}
	w.noOrphans(s)
}

// A cell that wants more memory than there is loses its kernel and learns why; the sandbox lives on.
func TestClusterOutOfMemoryIsTold(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 1})
	w.warm(1)
	sb := s.create(client.CreateRequest{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := sb.Run(ctx, client.RunRequest{Code: "x = b'x' * (1 << 30)"})
	if err != nil || out.Outcome != client.OutcomeOOM {
		t.Errorf("the cell is told %+v, %v", out, err)
	}
	says(t, sb, "echo alive", "alive")
	w.noOrphans(s)
}

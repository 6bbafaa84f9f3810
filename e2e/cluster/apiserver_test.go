package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// Without the API server nobody gets a sandbox, but those that live go on; when it is back the server hears of Pods again.
func TestClusterTheAPIServerRestarts(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 2})
	w.warm(2)
	sb := s.create(client.CreateRequest{})
	running := follow(t.Context(), sb, client.ExecRequest{Command: "while :; do echo tick; sleep 0.1; done"})
	running.line(t, 10*time.Second)

	w.cluster("kill", "kube-apiserver")
	back := false
	restart := func() {
		if !back {
			w.cluster("start", "kube-apiserver")
			back = true
		}
	}
	t.Cleanup(restart)
	says(t, sb, "echo alive", "alive")
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	if made, err := s.Create(ctx, client.CreateRequest{}); client.KindOf(err) != client.Unavailable {
		t.Errorf("a sandbox without an API server: %+v, %v", made, err)
	} else {
		t.Logf("a sandbox without an API server: %v", err)
	}
	for len(running.lines) > 0 {
		<-running.lines
	}
	running.line(t, 10*time.Second)
	restart()

	w.until(time.Minute, "sandbox after the restart", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		_, err := s.Create(ctx, client.CreateRequest{})
		return err == nil
	})
	running.line(t, 10*time.Second)
	w.kubectl("delete", "pod", "-n", w.namespace, w.podOf(sb.ID), "--wait=false")
	if info := s.ended(sb.ID, 2*time.Minute); info.Cause != "deleted" {
		t.Errorf("after the restart a deleted Pod is told as %q: %s", info.Cause, info.Message)
	}
	w.noOrphans(s)
}

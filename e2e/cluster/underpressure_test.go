package cluster_test

import (
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// A node that runs short of memory evicts Pods, and the sandbox says so. In the last file: the node says for some time afterwards that it is short.
func TestClusterAnEvictedPodIsTold(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 1})
	w.warm(1)
	sb := s.create(client.CreateRequest{})
	says(t, sb, "echo alive", "alive")
	t.Cleanup(func() { w.cluster("evict", "200Mi") })
	w.cluster("evict", "97%") // of the node's memory: more than is free anywhere, and not so much that its kubelet refuses to start
	info := s.ended(sb.ID, 3*time.Minute)
	if info.Cause != "evicted" || !strings.HasPrefix(info.Message, "its node evicted it: ") || !strings.Contains(info.Message, "memory") {
		t.Errorf("it ended by %q: %s", info.Cause, info.Message)
	}
	if _, err := sb.Exec(t.Context(), client.ExecRequest{Command: "true"}); client.KindOf(err) != client.Gone || !strings.Contains(err.Error(), "evicted") {
		t.Errorf("a later command is told %v", err)
	}
	w.noOrphans(s)
}

package cluster_test

import (
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
	if info.Cause != "evicted" {
		t.Errorf("it ended by %q: %s", info.Cause, info.Message)
	}
	t.Logf("it ended by %s: %s", info.Cause, info.Message)
}

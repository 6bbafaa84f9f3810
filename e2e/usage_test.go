package e2e_test

import (
	"testing"

	"github.com/covehq/cove/client"
)

func TestS0_80_S4_128_WhatSandboxesUseIsTold(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	before, err := sb.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sb.value("import os, time\nheld = bytearray(b'x') * (50 << 20)\nopen('written', 'wb').write(os.urandom(20 << 20))\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
	after, err := sb.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if after.CPUMS-before.CPUMS < 500 || after.MemoryBytes-before.MemoryBytes < 50<<20 || after.PeakBytes < after.MemoryBytes || after.DiskBytes-before.DiskBytes < 20<<20 || after.Pids < 2 {
		t.Errorf("it used %+v, and before %+v", after, before)
	}
	// Those of all together are at /metrics, which names no sandbox.
	now := s.metrics(t)
	if now["cove_sandboxes_cpu_seconds_total"] < float64(after.CPUMS)/1000 || now["cove_sandboxes_memory_bytes"] < float64(after.MemoryBytes) {
		t.Errorf("all together used %v s and %v bytes, this one %+v", now["cove_sandboxes_cpu_seconds_total"], now["cove_sandboxes_memory_bytes"], after)
	}
}

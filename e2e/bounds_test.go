package e2e_test

import (
	"testing"

	"github.com/covehq/cove/client"
)

// TestKernels_AreBounded starts kernels until the sandbox has no more: by the bound of kernels, or by its limit of processes.
func TestKernels_AreBounded(t *testing.T) {
	s := sharedServer(t)
	for name, c := range map[string]struct {
		limits client.Limits
		says   string
	}{
		"by number":    {client.Limits{Pids: 1000}, "at most 64 kernels"},
		"by processes": {client.Limits{Pids: 32}, "as many processes as it may have"},
	} {
		t.Run(name, func(t *testing.T) {
			sb := s.create(t, client.CreateRequest{Limits: &c.limits})
			var err error
			for n := 0; err == nil && n <= 64; n++ {
				_, err = sb.StartKernel(t.Context(), client.KernelRequest{})
			}
			expect(t, err, client.Exhausted, c.says)
			_, err = sb.RestartKernel(t.Context(), "one-more")
			expect(t, err, client.Exhausted, c.says)
			if got := sb.value("1 + 1"); got != "2" {
				t.Errorf("the first kernel says %s", got)
			}
			_, err = sb.Run(t.Context(), client.RunRequest{Code: "1", Kernel: "unknown"})
			expect(t, err, client.NotFound, "no kernel")
		})
	}
}

func TestTerminals_AreBounded(t *testing.T) {
	sb := sharedServer(t).create(t, client.CreateRequest{})
	sb.value(`import os; held = [os.openpty() for _ in range(256)]; len(held)`)
	session, err := sb.Start(t.Context(), client.ExecRequest{Argv: []string{"true"}, PTY: &client.PTYSize{Rows: 24, Cols: 80}})
	if err == nil {
		defer session.Close()
		for _, err = range session.Events() {
			if err != nil {
				break
			}
		}
	}
	expect(t, err, client.Exhausted, "as many terminals as it may have")
}

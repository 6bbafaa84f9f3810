package sandboxd_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	pb "github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb"
	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.Config.Handler)
	long := &pb.WriteStdinRequest{Payload: &pb.WriteStdinRequest_Input{Input: make([]byte, 1<<20)}}
	if _, err := w.rpc.WriteStdin(t.Context(), connect.NewRequest(long)); connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "large requests") {
		t.Error(err)
	}
}

package agentapi_test

import (
	"bytes"
	"net"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

func TestOutput_IsHandedOnInParts(t *testing.T) {
	large := bytes.Repeat([]byte("0123456789"), agentapi.ChunkSize/10)
	c := peer(t, func(conn net.Conn, _ agentapi.Request) {
		for _, frame := range []struct {
			kind agentapi.FrameKind
			text []byte
		}{{agentapi.FrameStdout, large}, {agentapi.FrameStderr, []byte("err")}, {agentapi.FrameStdout, nil}, {agentapi.FrameStdout, []byte("last")}} {
			if err := agentapi.WriteFrame(conn, frame.kind, frame.text); err != nil {
				t.Error(err)
			}
		}
		end(conn, agentapi.End{Outcome: agentapi.OutcomeOK})
	})
	s, err := c.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	var out, errs []byte
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if len(e.Data) > agentapi.OutputSize || cap(e.Data) > agentapi.OutputSize {
			t.Errorf("an event holds %d bytes of output, more than %d", cap(e.Data), agentapi.OutputSize)
		}
		switch e.Type {
		case agentapi.EventStdout:
			out = append(out, e.Data...)
		case agentapi.EventStderr:
			errs = append(errs, e.Data...)
		default:
		}
	}
	if want := append(bytes.Clone(large), "last"...); !bytes.Equal(out, want) || string(errs) != "err" {
		t.Errorf("%d bytes of stdout, want %d; stderr %q", len(out), len(want), errs)
	}
}

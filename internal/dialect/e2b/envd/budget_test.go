package envd_test

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb/envdpbconnect"
	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.Config.Handler)
	long := strings.Repeat("a", 200<<10)
	for name, options := range map[string][]connect.ClientOption{"as it is": nil, "compressed": {connect.WithSendGzip()}} {
		processes := envdpbconnect.NewProcessClient(w.Client(), w.URL, options...)
		_, err := processes.SendInput(t.Context(), connect.NewRequest(&envdpb.SendInputRequest{
			Input: &envdpb.ProcessInput{Input: &envdpb.ProcessInput_Stdin{Stdin: []byte(long)}},
		}))
		if connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "large requests") {
			t.Errorf("%s: input: %v", name, err)
		}
		stream, err := processes.Start(t.Context(), connect.NewRequest(&envdpb.StartRequest{
			Process: &envdpb.ProcessConfig{Cmd: "true", Args: []string{long}},
		}))
		if err == nil {
			for stream.Receive() {
			}
			err = stream.Err()
			stream.Close()
		}
		if connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "large requests") {
			t.Errorf("%s: start: %v", name, err)
		}
	}
}

// TestBodies_StreamOfInput sends far more than the budget in one stream: only the message that is
// worked on counts.
func TestBodies_StreamOfInput(t *testing.T) {
	w := newWorld2(t)
	b := transfer.NewBudget(1<<20, 1<<20)
	w.Config.Handler = b.Handler(w.Config.Handler)
	processes := envdpbconnect.NewProcessClient(w.Client(), w.URL)
	started, err := processes.Start(t.Context(), connect.NewRequest(&envdpb.StartRequest{
		Process: &envdpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "wc -c"}}, Stdin: new(true),
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer started.Close()
	if !started.Receive() {
		t.Fatal(started.Err())
	}
	pid := started.Msg().GetEvent().GetStart().GetPid()
	in := processes.StreamInput(t.Context())
	if err := in.Send(&envdpb.StreamInputRequest{Event: &envdpb.StreamInputRequest_Start{
		Start: &envdpb.StreamInputRequest_StartEvent{Process: byPID(pid)},
	}}); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if err := in.Send(&envdpb.StreamInputRequest{Event: &envdpb.StreamInputRequest_Data{Data: &envdpb.StreamInputRequest_DataEvent{
			Input: &envdpb.ProcessInput{Input: &envdpb.ProcessInput_Stdin{Stdin: make([]byte, 512<<10)}},
		}}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Errorf("ten messages of half the budget: %v", err)
	}
	for deadline := time.Now().Add(10 * time.Second); b.Used() != 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if b.Used() != 0 {
		t.Errorf("%d bytes are counted after the stream", b.Used())
	}
}

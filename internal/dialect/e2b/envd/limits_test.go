package envd_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
)

func TestMessagesAreBounded(t *testing.T) {
	w := newWorld(t)
	// What is sent compressed is small on the wire and as large as the other once it is unpacked.
	for name, opts := range map[string][]connect.ClientOption{"plain": nil, "compressed": {connect.WithSendGzip()}} {
		files, processes := w.files(opts...), w.processes(opts...)
		stat := func(size int) error {
			_, err := files.Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: "/" + strings.Repeat("x", size)}))
			return err
		}
		list := func(size int) error {
			_, err := files.ListDir(t.Context(), connect.NewRequest(&pb.ListDirRequest{Path: "/" + strings.Repeat("x", size)}))
			return err
		}
		signal := func(size int) error {
			tag := &pb.ProcessSelector{Selector: &pb.ProcessSelector_Tag{Tag: strings.Repeat("x", size)}}
			_, err := processes.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: tag, Signal: pb.Signal_SIGNAL_SIGKILL}))
			return err
		}
		start := func(size int) error {
			_, err := run(t, processes, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/true", Args: []string{strings.Repeat("x", size)}}})
			return err
		}
		send := func(size int) error {
			in := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: make([]byte, size)}}
			_, err := processes.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(1 << 30), Input: in}))
			return err
		}
		stream := func(size int) error {
			in := processes.StreamInput(t.Context())
			_ = in.Send(inputData(strings.Repeat("x", size))) // the answer tells what was wrong with it
			_, err := in.CloseAndReceive()
			return err
		}
		for _, size := range []int{200 << 10, 1 << 20, 3 << 20} {
			err := start(size)
			if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "one argument may have at most 131071 bytes") {
				t.Errorf("%s: a command of %d bytes: %.200v", name, size, err)
			}
		}
		for _, c := range []struct {
			name string
			call func(size int) error
			most int
		}{
			{"Stat", stat, 1 << 20}, {"ListDir", list, 1 << 20}, {"SendSignal", signal, 1 << 20},
			{"SendInput", send, 8 << 20}, {"StreamInput", stream, 8 << 20},
		} {
			t.Run(name+" "+c.name, func(t *testing.T) {
				if err := c.call(c.most); connect.CodeOf(err) != connect.CodeResourceExhausted {
					t.Errorf("more than may be: %.200v", err)
				}
				// None of these can succeed, but they are read.
				if err := c.call(c.most - 1000); err == nil || connect.CodeOf(err) == connect.CodeResourceExhausted {
					t.Errorf("as much as may be: %.200v", err)
				}
			})
		}
	}
}

package agentapi_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

func FuzzFrame(f *testing.F) {
	var whole bytes.Buffer
	agentapi.WriteFrame(&whole, agentapi.FrameStdout, []byte("hello"))
	agentapi.WriteFrame(&whole, agentapi.FrameEOF, nil)
	f.Add(whole.Bytes())
	f.Add([]byte{1, 0, 0, 0, 255, 255, 255, 255})
	f.Add([]byte{1, 0, 0, 0, 0, 255, 255, 255, 'x'})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := agentapi.NewReader(bytes.NewReader(data))
		var again bytes.Buffer
		for {
			frame, err := r.Read()
			if err != nil {
				break
			}
			if len(frame.Payload) > len(data) {
				t.Fatal("a payload is longer than what was sent")
			}
			if err := agentapi.WriteFrame(&again, frame.Kind, frame.Payload); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.HasPrefix(data, again.Bytes()) {
			t.Fatal("frames that were read are not those that were sent")
		}
	})
}

func FuzzRequest(f *testing.F) {
	f.Add(uint8(1), []byte(`{"op":"exec","params":{"argv":["sh"],"env":{"A":"b"},"timeout_ms":5}}`))
	f.Add(uint8(1), []byte(`{"op":"run","params":{"code":"1+1"}}`))
	f.Add(uint8(1), []byte(`{"op":"chmod","params":{"mode":-1}}`))
	f.Add(uint8(2), []byte(`{}`))
	f.Fuzz(func(t *testing.T, kind uint8, payload []byte) {
		req, err := agentapi.DecodeRequest(agentapi.Frame{Kind: agentapi.FrameKind(kind), Payload: payload})
		if err != nil {
			return
		}
		decode[agentapi.ExecParams](t, req)
		decode[agentapi.RunParams](t, req)
		decode[agentapi.WriteParams](t, req)
		decode[agentapi.ChmodParams](t, req)
		decode[agentapi.SignalParams](t, req)
		decode[agentapi.DialParams](t, req)
		decode[agentapi.WatchParams](t, req)
	})
}

// decode must give a value that can be sent again, or an error.
func decode[T any](t *testing.T, req agentapi.Request) {
	params, err := agentapi.DecodeParams[T](req)
	if err != nil {
		return
	}
	if err := agentapi.WriteJSON(io.Discard, agentapi.FrameRequest, params); err != nil {
		t.Fatal(err)
	}
}

// said is an agent that has said everything already and hears nothing.
type said struct {
	net.Conn
	r io.Reader
}

func (s said) Read(p []byte) (int, error)  { return s.r.Read(p) }
func (s said) Write(p []byte) (int, error) { return len(p), nil }
func (s said) Close() error                { return nil }

func FuzzEvent(f *testing.F) {
	for _, payload := range []string{
		`{"type":"file"}`, `{"type":"file","file":{"op":"create","path":"/a","entry":{}}}`, `{"type":"result"}`, `{"type":"error","error":null}`,
		`{"type":"end"}`, `{"type":"end","end":{"outcome":"ok"}}`, `{"type":"synced","count":-1}`, `null`,
	} {
		f.Add(uint8(agentapi.FrameEvent), []byte(payload))
	}
	f.Add(uint8(agentapi.FrameEnd), []byte(`{"outcome":"refused"}`))
	f.Add(uint8(agentapi.FrameEnd), []byte(`{"outcome":"ok","value":[{"id":"p1"}]}`))
	f.Add(uint8(agentapi.FrameStdout), []byte("x"))
	f.Fuzz(func(t *testing.T, kind uint8, payload []byte) {
		var sent bytes.Buffer
		agentapi.WriteFrame(&sent, agentapi.FrameKind(kind), payload)
		agentapi.WriteFrame(&sent, agentapi.FrameEnd, []byte(`{}`))
		c := agentapi.NewClient(func(context.Context) (net.Conn, error) { return said{r: bytes.NewReader(sent.Bytes())}, nil })
		s, err := c.Watch(t.Context(), agentapi.WatchParams{})
		if err != nil {
			return
		}
		for e, err := range s.Events() {
			if err != nil {
				break
			}
			follow(e)
		}
		list, _ := c.Processes(t.Context())
		for _, p := range list {
			_ = p.Argv[0]
		}
	})
}

// follow goes where whoever hears an event goes without looking.
func follow(e agentapi.Event) {
	switch e.Type {
	case agentapi.EventFile:
		_ = *e.File
	case agentapi.EventResult:
		_ = *e.Result
	case agentapi.EventError:
		_ = *e.Error
	case agentapi.EventEnd:
		_ = *e.End
	}
}

func FuzzChannelMessage(f *testing.F) {
	f.Add([]byte(`{"type":"boot","boot":{"id":"a"}}`), 0)
	f.Add([]byte(`{"type":"boot","boot":{"id":"a"},"kernel":{"name":"a","token":"t"},"channel":true}`), 5)
	f.Add([]byte(`{"type":"kernel","kernel":{"name":"a","token":"t","pid":2}}`), 4)
	f.Add([]byte(`{"type":"exit","exit":{"token":"t","code":-1,"signal":"SIGKILL"}}`), 0)
	f.Add([]byte(`{"type":"conn"}`), 1)
	f.Fuzz(func(t *testing.T, payload []byte, fds int) {
		m, err := agentapi.DecodeMessage(payload, fds)
		if err != nil {
			return
		}
		switch m.Type {
		case agentapi.MessageBoot:
			_ = *m.Boot
			want := 0
			if m.Kernel != nil {
				want = agentapi.KernelDescriptors
			}
			if m.Channel {
				want++
			}
			if fds != want || m.Kernel != nil && m.Kernel.Name == "" || want > 0 && m.Boot.Expected {
				t.Fatalf("%d descriptors, not %d, or a kernel that is not whole, or comes before its time", fds, want)
			}
		case agentapi.MessageExit:
			_ = *m.Exit
		case agentapi.MessageOOM:
			if m.Text == "" {
				t.Fatal("a victim without a name")
			}
		case agentapi.MessageKernel:
			if fds != agentapi.KernelDescriptors || m.Kernel.Name == "" {
				t.Fatal("a kernel that is not whole")
			}
		case agentapi.MessageConn, agentapi.MessageChannel:
			if fds != 1 {
				t.Fatal("a connection without a descriptor")
			}
		default:
			t.Fatalf("unknown message %q", m.Type)
		}
	})
}

package agentapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// peer is a client whose agent is a function that gets each connection after its request.
func peer(t *testing.T, agent func(conn net.Conn, req agentapi.Request)) *agentapi.Client {
	t.Helper()
	return agentapi.NewClient(func(context.Context) (net.Conn, error) {
		ours, theirs := pair(t)
		go func() {
			defer theirs.Close()
			f, err := agentapi.NewReader(theirs).Read()
			if err != nil {
				return
			}
			req, err := agentapi.DecodeRequest(f)
			if err != nil {
				t.Error(err)
				return
			}
			agent(theirs, req)
		}()
		return ours, nil
	})
}

func pair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		if conns[i], err = agentapi.DescriptorConn(fd); err != nil {
			t.Fatal(err)
		}
	}
	return conns[0], conns[1]
}

func end(conn net.Conn, e agentapi.End) { agentapi.WriteJSON(conn, agentapi.FrameEnd, e) }

func TestAnswerIsTheValueOfTheEnd(t *testing.T) {
	want := agentapi.Hello{Version: 1, PID: 7, Ops: []string{"hello"}}
	c := peer(t, func(conn net.Conn, req agentapi.Request) {
		value, _ := json.Marshal(want)
		end(conn, agentapi.End{Outcome: agentapi.OutcomeOK, Value: value})
	})
	got, err := c.Hello(t.Context())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestRefusalIsAFaultOfItsKind(t *testing.T) {
	for _, kind := range fault.Kinds {
		c := peer(t, func(conn net.Conn, req agentapi.Request) {
			end(conn, agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: kind, Message: "because"}})
		})
		_, err := c.Run(t.Context(), agentapi.RunParams{Code: "1"})
		if !fault.Is(err, kind) || fault.Message(err) != "because" {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestStreamYieldsWhatWasToldAndTheEndLast(t *testing.T) {
	c := peer(t, func(conn net.Conn, req agentapi.Request) {
		agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted, PID: 3})
		agentapi.WriteFrame(conn, agentapi.FrameStdout, []byte("out"))
		agentapi.WriteFrame(conn, agentapi.FrameStderr, []byte("err"))
		end(conn, agentapi.End{Outcome: agentapi.OutcomeError, ExitCode: 2})
	})
	s, err := c.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []agentapi.Event
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		e.Time = time.Time{}
		got = append(got, e)
	}
	want := []agentapi.Event{
		{Type: agentapi.EventStarted, PID: 3},
		{Type: agentapi.EventStdout, Data: []byte("out")},
		{Type: agentapi.EventStderr, Data: []byte("err")},
		{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: agentapi.OutcomeError, ExitCode: 2}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
}

func TestBrokenConnectionsAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		agent func(net.Conn, agentapi.Request)
		kind  fault.Kind
	}{
		"an agent that says nothing": {func(net.Conn, agentapi.Request) {}, fault.Unavailable},
		"an agent that stops halfway": {func(conn net.Conn, _ agentapi.Request) {
			conn.Write([]byte{byte(agentapi.FrameEvent), 0, 0, 0, 0, 0, 0, 9, '{'})
		}, fault.Unavailable},
		"an agent that speaks something else": {func(conn net.Conn, _ agentapi.Request) { io.WriteString(conn, "HTTP/1.1 400\r\n") }, fault.Internal},
		"an agent that sends broken JSON":     {func(conn net.Conn, _ agentapi.Request) { agentapi.WriteFrame(conn, agentapi.FrameEnd, []byte("{")) }, fault.Internal},
		"a frame that claims too much": {func(conn net.Conn, _ agentapi.Request) {
			conn.Write([]byte{byte(agentapi.FrameEvent), 0, 0, 0, 255, 255, 255, 255})
		}, fault.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := peer(t, c.agent).Exec(t.Context(), agentapi.ExecParams{})
			if !fault.Is(err, c.kind) {
				t.Errorf("%v (%s)", err, fault.KindOf(err))
			}
		})
	}
}

func TestAnEventWithoutItsContentIsRefused(t *testing.T) {
	for payload, whole := range map[string]bool{
		`{"type":"file"}`: false, `{"type":"file","file":null}`: false, `{"type":"result"}`: false, `{"type":"error"}`: false,
		`{"type":"end"}`: false, `{"type":"end","end":{"outcome":"refused"}}`: false,
		`{"type":"file","file":{}}`: true, `{"type":"result","result":{}}`: true, `{"type":"error","error":{}}`: true,
		`{"type":"synced","count":1}`: true, `{"type":"later-than-this-client"}`: true,
	} {
		t.Run(payload, func(t *testing.T) {
			c := peer(t, func(conn net.Conn, _ agentapi.Request) {
				agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted})
				agentapi.WriteFrame(conn, agentapi.FrameEvent, []byte(payload))
				end(conn, agentapi.End{Outcome: agentapi.OutcomeOK})
			})
			s, err := c.Watch(t.Context(), agentapi.WatchParams{})
			if err != nil {
				t.Fatal(err)
			}
			for _, err = range s.Events() {
			}
			var protocol *agentapi.ProtocolError
			if refused := errors.As(err, &protocol) && fault.Is(err, fault.Internal); refused == whole || whole && err != nil {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

func TestAProcessWithoutACommandIsRefused(t *testing.T) {
	for value, ok := range map[string]bool{
		`[{"id":"p1","pid":2}]`: false, `[{"id":"p1","argv":[]}]`: false, `[{"id":"p1","argv":["a"]},{}]`: false,
		`[{"id":"p1","argv":["a"]}]`: true, `[]`: true, `null`: true,
	} {
		c := peer(t, func(conn net.Conn, _ agentapi.Request) {
			end(conn, agentapi.End{Outcome: agentapi.OutcomeOK, Value: json.RawMessage(value)})
		})
		if list, err := c.Processes(t.Context()); ok != (err == nil) || !ok && !fault.Is(err, fault.Internal) {
			t.Errorf("%s: %+v, %v", value, list, err)
		}
	}
}

func TestCancellingClosesPromptlyAndLeavesNothing(t *testing.T) {
	left := make(chan struct{}, 64)
	c := peer(t, func(conn net.Conn, req agentapi.Request) {
		agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted})
		io.Copy(io.Discard, conn)
		left <- struct{}{}
	})
	before := runtime.NumGoroutine()
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := c.Exec(ctx, agentapi.ExecParams{})
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Millisecond, cancel)
		var last error
		for _, err := range s.Events() {
			last = err
		}
		if !errors.Is(last, context.Canceled) {
			t.Error(last)
		}
		<-left
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	s, err := c.Exec(ctx, agentapi.ExecParams{})
	if err == nil {
		for _, err = range s.Events() {
		}
	}
	if !fault.Is(err, fault.Timeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	<-left
	for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines became %d", before, runtime.NumGoroutine())
		}
		time.Sleep(time.Millisecond)
	}
}

func TestLeavingTheLoopCloses(t *testing.T) {
	left := make(chan struct{})
	c := peer(t, func(conn net.Conn, req agentapi.Request) {
		agentapi.WriteJSON(conn, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventStarted})
		io.Copy(io.Discard, conn)
		close(left)
	})
	s, err := c.Exec(t.Context(), agentapi.ExecParams{})
	if err != nil {
		t.Fatal(err)
	}
	for range s.Events() {
		break
	}
	<-left
}

func TestARefusedUploadSaysWhy(t *testing.T) {
	c := peer(t, func(conn net.Conn, req agentapi.Request) {
		end(conn, agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.DiskFull, Message: "the disk is full"}})
	})
	_, err := c.Write(t.Context(), agentapi.WriteParams{Path: "x"}, bytes.NewReader(make([]byte, 8<<20)))
	if !fault.Is(err, fault.DiskFull) {
		t.Error(err)
	}
}

func TestMessagesCarryDescriptors(t *testing.T) {
	a, b := channel(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := agentapi.SendMessage(a, agentapi.Message{Type: agentapi.MessageConn}, int(w.Fd())); err != nil {
		t.Fatal(err)
	}
	w.Close()
	m, fds, err := agentapi.ReceiveMessage(b)
	if err != nil || m.Type != agentapi.MessageConn || len(fds) != 1 {
		t.Fatalf("%+v %v %v", m, fds, err)
	}
	flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fds[0]), syscall.F_GETFD, 0)
	if flags&syscall.FD_CLOEXEC == 0 {
		t.Error("a received descriptor would reach children")
	}
	syscall.Write(fds[0], []byte("x"))
	agentapi.CloseDescriptors(fds)
	if got, _ := io.ReadAll(r); string(got) != "x" {
		t.Errorf("%q", got)
	}
	a.Close()
	if _, _, err := agentapi.ReceiveMessage(b); err != io.EOF {
		t.Errorf("the end of a channel is %v", err)
	}
}

func TestBadMessagesLeaveNoDescriptors(t *testing.T) {
	a, b := channel(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	before := descriptors(t)
	for payload, n := range map[string]int{`{"type":"conn"}`: 2, `{"type":"boot"}`: 1, `not json`: 1, `{"type":"kernel","kernel":{"name":"x"}}`: 3, `{"type":"conn","x":0}`: 9} {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = int(w.Fd())
		}
		if _, _, err := a.WriteMsgUnix([]byte(payload), syscall.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		if _, got, err := agentapi.ReceiveMessage(b); err == nil {
			t.Errorf("%s with %d descriptors was taken: %v", payload, n, got)
		}
	}
	if err := agentapi.SendMessage(a, agentapi.Message{Type: agentapi.MessageBoot, Boot: &agentapi.Boot{ID: strings.Repeat("x", agentapi.MaxMessage)}}); err == nil {
		t.Error("a message over the limit was sent")
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors became %d", before, after)
	}
	w.Close()
}

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func channel(t testing.TB) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		if ends[i], err = agentapi.Channel(fd); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

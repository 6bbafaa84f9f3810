package envd_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb/envdpbconnect"
)

func bash(script string) *pb.StartRequest {
	return &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}, Stdin: proto.Bool(false)}
}

// heard is all that a stream of process events told.
type heard struct {
	pid                 uint32
	stdout, stderr, pty string
	end                 *pb.ProcessEvent_EndEvent
	keepalives          int
}

func (h *heard) add(t testing.TB, e *pb.ProcessEvent) {
	t.Helper()
	if h.end != nil {
		t.Errorf("after the end came %v", e)
	}
	switch e := e.GetEvent().(type) {
	case *pb.ProcessEvent_Start:
		h.pid = e.Start.GetPid()
	case *pb.ProcessEvent_Data:
		h.stdout += string(e.Data.GetStdout())
		h.stderr += string(e.Data.GetStderr())
		h.pty += string(e.Data.GetPty())
	case *pb.ProcessEvent_End:
		h.end = e.End
	case *pb.ProcessEvent_Keepalive:
		h.keepalives++
	}
}

func run(t testing.TB, c envdpbconnect.ProcessClient, req *pb.StartRequest) (heard, error) {
	t.Helper()
	stream, err := c.Start(t.Context(), connect.NewRequest(req))
	if err != nil {
		return heard{}, err
	}
	defer stream.Close()
	var h heard
	for stream.Receive() {
		h.add(t, stream.Msg().GetEvent())
	}
	return h, stream.Err()
}

func ended(code int32, exited bool, status string) *pb.ProcessEvent_EndEvent {
	e := &pb.ProcessEvent_EndEvent{ExitCode: code, Exited: exited, Status: status}
	if code != 0 {
		e.Error = &status
	}
	return e
}

func TestStart(t *testing.T) {
	w := newWorld(t)
	// A command that ended by a signal has no status of its own.
	cases := map[string]struct {
		req            *pb.StartRequest
		stdout, stderr string
		end            *pb.ProcessEvent_EndEvent
	}{
		"a command that succeeds":          {bash("echo out; echo err >&2"), "out\n", "err\n", ended(0, true, "exit status 0")},
		"a command that fails":             {bash("exit 3"), "", "", ended(3, true, "exit status 3")},
		"a command that a signal ends":     {bash("kill -9 $$"), "", "", ended(-1, false, "signal: killed")},
		"another signal":                   {bash("kill -15 $$"), "", "", ended(-1, false, "signal: terminated")},
		"bytes that are not text":          {bash(`printf 'a\377\000b'`), "a\xff\x00b", "", ended(0, true, "exit status 0")},
		"the sandbox's environment":        {bash(`echo $GREETING`), "hello\n", "", ended(0, true, "exit status 0")},
		"stdin that is off is empty":       {bash(`cat`), "", "", ended(0, true, "exit status 0")},
		"a program that is looked up":      {&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "echo", Args: []string{"hi"}}}, "hi\n", "", ended(0, true, "exit status 0")},
		"its own environment wins":         {with(bash(`echo $GREETING`), func(r *pb.StartRequest) { r.Process.Envs = map[string]string{"GREETING": "bye"} }), "bye\n", "", ended(0, true, "exit status 0")},
		"its own working directory":        {with(bash(`pwd`), func(r *pb.StartRequest) { r.Process.Cwd = proto.String("/usr") }), "/usr\n", "", ended(0, true, "exit status 0")},
		"a home as working directory":      {with(bash(`[ $PWD = ~ ] && echo home`), func(r *pb.StartRequest) { r.Process.Cwd = proto.String("~") }), "home\n", "", ended(0, true, "exit status 0")},
		"more output than a pipe can hold": {bash(`head -c 300000 /dev/zero | tr '\0' x`), strings.Repeat("x", 300000), "", ended(0, true, "exit status 0")},
	}
	for codec, opts := range codecs {
		for name, c := range cases {
			t.Run(codec+"/"+name, func(t *testing.T) {
				h, err := run(t, w.processes(opts...), c.req)
				if err != nil {
					t.Fatal(err)
				}
				if h.pid == 0 {
					t.Error("no start came")
				}
				if h.stdout != c.stdout || h.stderr != c.stderr {
					t.Errorf("told %.80q and %.80q, want %.80q and %.80q", h.stdout, h.stderr, c.stdout, c.stderr)
				}
				if diff := cmp.Diff(c.end, h.end, protocmp.Transform()); diff != "" {
					t.Errorf("end: %s", diff)
				}
			})
		}
	}
}

func with(r *pb.StartRequest, f func(*pb.StartRequest)) *pb.StartRequest {
	f(r)
	return r
}

func TestStartRefused(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		req  *pb.StartRequest
		user string
		code connect.Code
		text string
	}{
		"no command":                {&pb.StartRequest{}, "", connect.CodeInvalidArgument, "no command"},
		"no such program":           {&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/nowhere/x"}}, "", connect.CodeInvalidArgument, "/nowhere/x"},
		"no such directory":         {with(bash("true"), func(r *pb.StartRequest) { r.Process.Cwd = proto.String("/nowhere") }), "", connect.CodeInvalidArgument, "/nowhere"},
		"a variable without a name": {with(bash("true"), func(r *pb.StartRequest) { r.Process.Envs = map[string]string{"": "x"} }), "", connect.CodeInvalidArgument, "environment"},
		"nobody of that name":       {bash("true"), "nobody-here", connect.CodeUnauthenticated, "invalid username: 'nobody-here'"},
		"a number is no name":       {bash("true"), "4711", connect.CodeUnauthenticated, "invalid username: '4711'"},
	} {
		t.Run(name, func(t *testing.T) {
			req := connect.NewRequest(c.req)
			if c.user != "" {
				req.Header().Set("Authorization", basic(c.user))
			}
			stream, err := w.processes().Start(t.Context(), req)
			if err == nil {
				for stream.Receive() {
					t.Errorf("told %v", stream.Msg())
				}
				err = stream.Err()
			}
			if connect.CodeOf(err) != c.code || !strings.Contains(fmt.Sprint(err), c.text) {
				t.Errorf("got %v, want %v with %q", err, c.code, c.text)
			}
		})
	}
}

func TestTimeoutIsTheCommands(t *testing.T) {
	w := newWorld(t)
	flag := w.home + "/went-on"
	ctx, cancel := context.WithCancel(t.Context())
	req := connect.NewRequest(bash("sleep 600; touch " + flag))
	req.Header().Set("Connect-Timeout-Ms", "300")
	stream, err := w.processes().Start(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	for stream.Receive() {
		t.Errorf("told %v", stream.Msg())
	}
	if connect.CodeOf(stream.Err()) != connect.CodeDeadlineExceeded {
		t.Errorf("the stream ended with %v", stream.Err())
	}
	cancel()
	// Whoever joins late hears how it ended.
	late, err := w.processes().Connect(t.Context(), connect.NewRequest(&pb.ConnectRequest{Process: byPID(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	var h heard
	for late.Receive() {
		h.add(t, late.Msg().GetEvent())
	}
	if diff := cmp.Diff(ended(-1, false, "signal: killed"), h.end, protocmp.Transform()); diff != "" || h.pid != pid {
		t.Errorf("late end of %d: %s %v", h.pid, diff, late.Err())
	}
}

func byPID(pid uint32) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}
}

func TestCommandOutlivesItsClient(t *testing.T) {
	w := newWorld(t)
	c := w.processes(connect.WithProtoJSON())
	ctx, cancel := context.WithCancel(t.Context())
	req := bash("read line; echo got $line; exit 7")
	req.Stdin, req.Tag = proto.Bool(true), proto.String("mine")
	stream, err := c.Start(ctx, connect.NewRequest(req))
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	list, err := c.List(t.Context(), connect.NewRequest(&pb.ListRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	want := []*pb.ProcessInfo{{Config: req.GetProcess(), Pid: pid, Tag: proto.String("mine")}}
	if diff := cmp.Diff(want, list.Msg.GetProcesses(), protocmp.Transform()); diff != "" {
		t.Errorf("list: %s", diff)
	}
	cancel()
	for stream.Receive() {
	}

	again, err := c.Connect(t.Context(), connect.NewRequest(&pb.ConnectRequest{
		Process: &pb.ProcessSelector{Selector: &pb.ProcessSelector_Tag{Tag: "mine"}}}))
	if err != nil || !again.Receive() {
		t.Fatal(err, again.Err())
	}
	if got := again.Msg().GetEvent().GetStart().GetPid(); got != pid {
		t.Errorf("joined %d, want %d", got, pid)
	}
	if _, err := c.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{
		Process: byPID(pid), Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte("a line\n")}},
	})); err != nil {
		t.Fatal(err)
	}
	var h heard
	for again.Receive() {
		h.add(t, again.Msg().GetEvent())
	}
	if h.stdout != "got a line\n" || h.end.GetExitCode() != 7 {
		t.Errorf("heard %+v, %v", h, again.Err())
	}
}

func TestInput(t *testing.T) {
	for name, w := range map[string]*world{"http/1.1": newWorld(t), "h2": newWorld2(t)} {
		t.Run(name, func(t *testing.T) { input(t, w) })
	}
}

func input(t *testing.T, w *world) {
	c := w.processes(connect.WithProtoJSON())
	start := func(t *testing.T, req *pb.StartRequest) (uint32, func() heard) {
		stream, err := c.Start(t.Context(), connect.NewRequest(req))
		if err != nil || !stream.Receive() {
			t.Fatal(err, stream.Err())
		}
		return stream.Msg().GetEvent().GetStart().GetPid(), func() (h heard) {
			for stream.Receive() {
				h.add(t, stream.Msg().GetEvent())
			}
			return h
		}
	}
	send := func(pid uint32, text string, pty bool) error {
		in := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte(text)}}
		if pty {
			in.Input = &pb.ProcessInput_Pty{Pty: []byte(text)}
		}
		_, err := c.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: byPID(pid), Input: in}))
		return err
	}
	shut := func(pid uint32) error {
		_, err := c.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: byPID(pid)}))
		return err
	}
	t.Run("stdin comes back from cat and its close ends it", func(t *testing.T) {
		pid, rest := start(t, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "cat"}})
		if err := errors.Join(send(pid, "línea\n\x00\n", false), shut(pid)); err != nil {
			t.Fatal(err)
		}
		if h := rest(); h.stdout != "línea\n\x00\n" || h.end.GetExitCode() != 0 || !h.end.GetExited() {
			t.Errorf("heard %+v", h)
		}
		if err := shut(pid); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("closing the stdin of one that has ended: %v", err)
		}
	})
	t.Run("a stream of input", func(t *testing.T) {
		pid, rest := start(t, &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "cat"}})
		in := c.StreamInput(t.Context())
		messages := []*pb.StreamInputRequest{
			{Event: &pb.StreamInputRequest_Start{Start: &pb.StreamInputRequest_StartEvent{Process: byPID(pid)}}},
			{Event: &pb.StreamInputRequest_Keepalive{Keepalive: &pb.StreamInputRequest_KeepAlive{}}},
			inputData("one "), inputData(""), inputData("two"),
		}
		for _, m := range messages {
			if err := in.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := in.CloseAndReceive(); err != nil {
			t.Fatal(err)
		}
		if err := shut(pid); err != nil {
			t.Fatal(err)
		}
		if h := rest(); h.stdout != "one two" {
			t.Errorf("heard %+v", h)
		}
	})
	t.Run("a stream of input for nobody", func(t *testing.T) {
		in := c.StreamInput(t.Context())
		_ = in.Send(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Start{Start: &pb.StreamInputRequest_StartEvent{Process: byPID(1 << 30)}}})
		if _, err := in.CloseAndReceive(); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a stream of input that does not begin", func(t *testing.T) {
		in := c.StreamInput(t.Context())
		_ = in.Send(inputData("x"))
		if _, err := in.CloseAndReceive(); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("got %v", err)
		}
	})
	t.Run("input that a process cannot take", func(t *testing.T) {
		pid, rest := start(t, bash("sleep 600"))
		if err := send(pid, "x", false); connect.CodeOf(err) != connect.CodeInternal {
			t.Errorf("without stdin: %v", err)
		}
		if err := send(pid, "x", true); connect.CodeOf(err) != connect.CodeInternal {
			t.Errorf("without a terminal: %v", err)
		}
		if err := errors.Join(shut(pid), shut(pid)); err != nil {
			t.Errorf("closing what is not open: %v", err)
		}
		kill(t, c, pid)
		if h := rest(); h.end.GetStatus() != "signal: killed" {
			t.Errorf("heard %+v", h)
		}
	})
	t.Run("a terminal", func(t *testing.T) {
		req := &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", "stty -echo; read go; stty size; exit 4"}},
			Pty: &pb.PTY{Size: &pb.PTY_Size{Rows: 10, Cols: 20}}}
		pid, rest := start(t, req)
		if _, err := c.Update(t.Context(), connect.NewRequest(&pb.UpdateRequest{Process: byPID(pid),
			Pty: &pb.PTY{Size: &pb.PTY_Size{Rows: 30, Cols: 100}}})); err != nil {
			t.Fatal(err)
		}
		if err := send(pid, "x\n", false); connect.CodeOf(err) != connect.CodeInternal {
			t.Errorf("stdin of a terminal: %v", err)
		}
		if err := shut(pid); connect.CodeOf(err) != connect.CodeInternal {
			t.Errorf("closing a terminal's stdin: %v", err)
		}
		if err := send(pid, "go\n", true); err != nil {
			t.Fatal(err)
		}
		if h := rest(); !strings.Contains(h.pty, "30 100") || h.stdout != "" || h.end.GetExitCode() != 4 {
			t.Errorf("heard %+v", h)
		}
	})
}

func inputData(text string) *pb.StreamInputRequest {
	return &pb.StreamInputRequest{Event: &pb.StreamInputRequest_Data{Data: &pb.StreamInputRequest_DataEvent{
		Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte(text)}}}}}
}

func kill(t testing.TB, c envdpbconnect.ProcessClient, pid uint32) {
	t.Helper()
	if _, err := c.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Fatal(err)
	}
}

func TestUnknownProcess(t *testing.T) {
	w := newWorld(t)
	c := w.processes()
	which := byPID(1 << 30)
	calls := map[string]func() error{
		"connect": func() error {
			s, err := c.Connect(t.Context(), connect.NewRequest(&pb.ConnectRequest{Process: which}))
			if err != nil {
				return err
			}
			s.Receive()
			return s.Err()
		},
		"signal": func() error {
			_, err := c.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{Process: which, Signal: pb.Signal_SIGNAL_SIGKILL}))
			return err
		},
		"input": func() error {
			_, err := c.SendInput(t.Context(), connect.NewRequest(&pb.SendInputRequest{Process: which, Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{}}}))
			return err
		},
		"close": func() error {
			_, err := c.CloseStdin(t.Context(), connect.NewRequest(&pb.CloseStdinRequest{Process: which}))
			return err
		},
		"resize": func() error {
			_, err := c.Update(t.Context(), connect.NewRequest(&pb.UpdateRequest{Process: which, Pty: &pb.PTY{}}))
			return err
		},
	}
	for name, call := range calls {
		if err := call(); connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "process with pid 1073741824 not found") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeepalive(t *testing.T) {
	w := newWorld(t)
	req := connect.NewRequest(bash("sleep 600"))
	req.Header().Set("Keepalive-Ping-Interval", "1")
	c := w.processes()
	stream, err := c.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var h heard
	for h.keepalives == 0 && stream.Receive() {
		h.add(t, stream.Msg().GetEvent())
	}
	if h.pid == 0 || h.keepalives != 1 {
		t.Errorf("heard %+v, %v", h, stream.Err())
	}
}

func TestStreamsAreCutWithTheSandbox(t *testing.T) {
	for name, w := range map[string]*world{"http/1.1": newWorld(t), "h2": newWorld2(t)} {
		t.Run(name, func(t *testing.T) { streamsAreCut(t, w) })
	}
}

func streamsAreCut(t *testing.T, w *world) {
	c := w.processes()
	stream, err := c.Start(t.Context(), connect.NewRequest(bash("sleep 600")))
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	watch, err := w.files().WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{Path: w.home}))
	if err != nil || !watch.Receive() {
		t.Fatal(err, watch.Err())
	}
	if _, err := w.manager.Kill(t.Context(), acme, w.box.ID); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]interface {
		Receive() bool
		Err() error
	}{"process": stream, "watch": watch} {
		for s.Receive() {
			t.Errorf("%s: something came after the sandbox's end", name)
		}
		var wire *connect.Error
		if errors.As(s.Err(), &wire) && connect.IsWireError(s.Err()) || !cut(s.Err()) {
			t.Errorf("%s: the stream ended with a word of its own: %v", name, s.Err())
		}
	}
}

func cut(err error) bool {
	return err != nil && (errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(err.Error(), "EOF") || strings.Contains(err.Error(), "reset") ||
		strings.Contains(err.Error(), "INTERNAL_ERROR"))
}

func TestProcessesAreLogged(t *testing.T) {
	w := newWorld(t)
	req := bash("true " + strings.Repeat("x", 300))
	req.Process.Args = append([]string{"-l"}, req.Process.Args...)
	req.Process.Envs = map[string]string{"SECRET": "do-not-log"}
	if _, err := run(t, w.processes(), req); err != nil {
		t.Fatal(err)
	}
	lines := w.logged()
	if len(lines) != 2 || lines[0].Message != "process started" || lines[1].Message != "process ended" || lines[1].Fields["status"] != "exit status 0" {
		t.Fatalf("logged %+v", lines)
	}
	if cmd := lines[0].Fields["cmd"]; cmd != "true "+strings.Repeat("x", 195)+"…" {
		t.Errorf("cmd %q", cmd)
	}
	if strings.Contains(fmt.Sprint(lines), "do-not-log") {
		t.Error("the environment is in the log")
	}
}

func basic(user string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
}

func TestMalformed(t *testing.T) {
	w := newWorld(t)
	frame := func(flags byte, size uint32, payload string) []byte {
		return append([]byte{flags, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size)}, payload...)
	}
	for name, c := range map[string]struct {
		path, kind string
		body       []byte
		want       string
	}{
		"no frame":                {"Start", "application/connect+json", nil, `"code":"unimplemented"`},
		"half a header":           {"Start", "application/connect+json", []byte{0, 0}, `"code":"internal"`},
		"half a frame":            {"Start", "application/connect+json", frame(0, 100, "{}"), `"code":"internal"`},
		"no JSON":                 {"Start", "application/connect+json", frame(0, 3, "{{{"), `"code":"invalid_argument"`},
		"wrong types":             {"Start", "application/connect+json", frame(0, 15, `{"process":"x"}`), `"code":"invalid_argument"`},
		"more than is allowed":    {"Start", "application/connect+json", frame(0, 1<<31, "{}"), `"code":"invalid_argument"`},
		"unknown fields are fine": {"List", "application/json", []byte(`{"new":[1,{"x":2}]}`), `{}`},
		"unary without JSON":      {"List", "application/json", []byte(`{`), `"code":"invalid_argument"`},
		"unary input of no kind":  {"SendInput", "application/json", []byte(`{"process":{"pid":1}}`), `"code":"invalid_argument"`},
		"no selector":             {"SendSignal", "application/json", []byte(`{"signal":"SIGNAL_SIGKILL"}`), `"code":"invalid_argument"`},
		"no signal":               {"SendSignal", "application/json", []byte(`{"process":{"pid":1}}`), `"code":"unimplemented"`},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := w.Client().Post(w.URL+"/process.Process/"+c.path, c.kind, bytes.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if !strings.Contains(strings.ReplaceAll(string(body), " ", ""), strings.ReplaceAll(c.want, " ", "")) {
				t.Errorf("%s: %q, want %s", resp.Status, body, c.want)
			}
		})
	}
	if n, _ := os.ReadDir(w.home); len(n) != 0 {
		t.Errorf("something was left: %v", n)
	}
}

package sandboxd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd"
	pb "github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb/processpbconnect"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// It is tested with a real Manager and a real agent; only what lets requests in is a double.

type world struct {
	*httptest.Server
	t       testing.TB
	manager *sandbox.Manager
	box     sandbox.Sandbox
	home    string
	away    string
	rpc     processpbconnect.ProcessServiceClient
}

var acme = auth.Principal{Tenant: "acme"}

func newWorld(t testing.TB) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	driver, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	m := sandbox.NewManager(sandbox.Config{}, driver, store, catalogue{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	w := &world{t: t, manager: m, home: filepath.Join(t.TempDir(), "workspace"), away: t.TempDir()}
	w.box, _, err = m.Create(t.Context(), acme, sandbox.Spec{Template: "base", Env: map[string]string{"SANDBOX_NAME": "box", "SANDBOX_TOKEN": "hunter2", "OTHER": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	h := sandboxd.New(m, log).At(w.home)
	w.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { h.Serve(rw, r, acme, w.box.ID) }))
	w.Config.Protocols = new(http.Protocols)
	w.Config.Protocols.SetHTTP1(true)
	w.Config.Protocols.SetUnencryptedHTTP2(true)
	w.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(w.Close)
	w.Start()
	plain := &http.Transport{DialContext: new(net.Dialer).DialContext, Protocols: new(http.Protocols)}
	plain.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(plain.CloseIdleConnections)
	w.rpc = processpbconnect.NewProcessServiceClient(&http.Client{Transport: plain}, w.URL, connect.WithGRPC())
	return w
}

type catalogue struct{}

func (catalogue) Resolve(context.Context, string, string) (*template.Template, error) {
	return &template.Template{Name: "base", Digest: "d1"}, nil
}

func (w *world) ask(method, path, body string, headers ...string) (status int, text string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := w.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, string(got)
}

func TestFiles(t *testing.T) {
	w := newWorld(t)
	escaped := strings.ReplaceAll(w.away[1:], "/", "%2F")
	for _, tc := range []struct {
		name, method, path, body string
		status                   int
		says                     string
	}{
		{"the home is there and empty", "GET", "/v1/files/", "", 200, `"entries":[]`},
		{"a file is written", "PUT", "/v1/files/a%2Fb%20c", "content", 204, ""},
		{"and read", "GET", "/v1/files/a%2Fb%20c", "", 200, "content"},
		{"and is there", "HEAD", "/v1/files/a%2Fb%20c", "", 200, ""},
		{"a directory is listed", "GET", "/v1/files/a", "", 200, `"name":"b c","size":7,"type":"file"`},
		{"one elsewhere", "PUT", "/v1/files/" + escaped + "%2Fx", "away", 204, ""},
		{"is where a command finds it", "GET", "/v1/files/%2F" + escaped + "%2Fx", "", 200, "away"},
		{"a mode", "PUT", "/v1/files/run.sh?mode=0755", "#!/bin/sh\n", 204, ""},
		{"is told", "GET", "/v1/files/", "", 200, `"mode":"0755"`},
		{"a mode that is none", "PUT", "/v1/files/x?mode=999", "", 400, `"code":"invalid"`},
		{"a missing file", "GET", "/v1/files/missing", "", 404, `"code":"not_found"`},
		{"a missing file's head", "HEAD", "/v1/files/missing", "", 404, ""},
		{"below a file", "GET", "/v1/files/run.sh%2Fx", "", 404, `"code":"not_found"`},
		{"a NUL", "GET", "/v1/files/a%00b", "", 400, `"code":"invalid"`},
		{"no name", "PUT", "/v1/files/", "x", 400, `"code":"invalid"`},
		{"a directory that is not empty", "DELETE", "/v1/files/a", "", 409, `"code":"conflict"`},
		{"with all that is in it", "DELETE", "/v1/files/a?recursive=true", "", 204, ""},
		{"is gone", "GET", "/v1/files/a", "", 404, ""},
		{"what is gone", "DELETE", "/v1/files/a", "", 404, ""},
		{"the home stays", "DELETE", "/v1/files/.?recursive=true", "", 403, `"code":"denied"`},
		{"the root stays", "DELETE", "/v1/files/%2F?recursive=true", "", 403, `"code":"denied"`},
		{"another method", "POST", "/v1/files/x", "", 405, `"message"`},
		{"another path", "GET", "/v2/files/x", "", 404, "/v1/files"},
		{"health", "GET", "/v1/health", "", 200, `"status":"ok"`},
		{"a part of the environment", "GET", "/v1/metadata", "", 200, `{"env":{"SANDBOX_NAME":"box"}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if status, text := w.ask(tc.method, tc.path, tc.body); status != tc.status || !strings.Contains(text, tc.says) {
				t.Errorf("%d %s", status, text)
			}
		})
	}
	t.Run("a form is the file in it", func(t *testing.T) {
		body := "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nin a form\r\n--B--\r\n"
		if status, text := w.ask("PUT", "/v1/files/form", body, "Content-Type", "multipart/form-data; boundary=B"); status != 204 {
			t.Fatalf("%d %s", status, text)
		}
		if got, err := os.ReadFile(w.home + "/form"); string(got) != "in a form" {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("times can be read", func(t *testing.T) {
		_, text := w.ask("GET", "/v1/files/", "")
		var list struct {
			Entries []struct {
				Modified time.Time `json:"modified_at"`
			}
		}
		if err := json.Unmarshal([]byte(text), &list); err != nil || len(list.Entries) == 0 || time.Since(list.Entries[0].Modified) > time.Hour {
			t.Errorf("%s: %v", text, err)
		}
	})
}

func config(command ...string) *pb.ProcessConfig { return &pb.ProcessConfig{Command: command} }

func TestExecute(t *testing.T) {
	w := newWorld(t)
	away := w.away
	for _, tc := range []struct {
		name   string
		config *pb.ProcessConfig
		want   string
		code   int32
	}{
		{"output and errors", config("/bin/sh", "-c", "echo out; echo err >&2; exit 3"), "out\n|err\n", 3},
		{"it starts in the home", config("pwd"), w.home + "\n|", 0},
		{"or elsewhere", &pb.ProcessConfig{Command: []string{"pwd"}, Cwd: &away}, w.away + "\n|", 0},
		{"with variables", &pb.ProcessConfig{Command: []string{"/bin/sh", "-c", `echo "$A"`}, EnvVars: map[string]string{"A": "b c"}}, "b c\n|", 0},
		{"a signal", config("/bin/sh", "-c", "kill -9 $$"), "|", 137},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := w.rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: tc.config}))
			if err != nil {
				t.Fatal(err)
			}
			if text := string(got.Msg.GetStdout()) + "|" + string(got.Msg.GetStderr()); text != tc.want || got.Msg.GetExitCode() != tc.code {
				t.Errorf("%q, exit %d", text, got.Msg.GetExitCode())
			}
		})
	}
	t.Run("too much output is cut, and said to be", func(t *testing.T) {
		got, err := w.rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: config("head", "-c", "5000000", "/dev/zero")}))
		if err != nil || len(got.Msg.GetStdout()) != 3<<19 || !bytes.Contains(got.Msg.GetStderr(), []byte("left out")) {
			t.Errorf("%v, %d bytes, %q", err, len(got.Msg.GetStdout()), got.Msg.GetStderr())
		}
	})
	t.Run("a deadline kills", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := w.rpc.Execute(ctx, connect.NewRequest(&pb.ExecuteRequest{Config: config("/bin/sh", "-c", "sleep 30; echo late > late")}))
		if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
			t.Errorf("%v", err)
		}
	})
	for name, c := range map[string]struct {
		config *pb.ProcessConfig
		want   connect.Code
	}{
		"nothing":                  {nil, connect.CodeInvalidArgument},
		"an empty program":         {config(""), connect.CodeInvalidArgument},
		"a NUL":                    {config("echo", "a\x00b"), connect.CodeInvalidArgument},
		"a variable without name":  {&pb.ProcessConfig{Command: []string{"env"}, EnvVars: map[string]string{"": "x"}}, connect.CodeInvalidArgument},
		"a program that is not":    {config("no-such-program"), connect.CodeNotFound},
		"a directory that is not":  {&pb.ProcessConfig{Command: []string{"pwd"}, Cwd: new(string("/no/such"))}, connect.CodeNotFound},
		"arguments that no one is": {config("echo", strings.Repeat("x", 200_000)), connect.CodeInvalidArgument},
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			if _, err := w.rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: c.config})); connect.CodeOf(err) != c.want {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestCommand_OverMessage: a command that is longer than a message is refused for good, in every
// protocol.
func TestCommand_OverMessage(t *testing.T) {
	w := newWorld(t)
	const most = 4 << 20
	for name, rpc := range map[string]processpbconnect.ProcessServiceClient{
		"gRPC":    w.rpc,
		"Connect": processpbconnect.NewProcessServiceClient(w.Client(), w.URL),
	} {
		for _, size := range []int{most - 100, most + 1, 5 * most} {
			long := config("/bin/true", strings.Repeat("x", size))
			_, err := rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: long}))
			check := func(what string, err error) {
				if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "one argument may have at most 131071 bytes") ||
					size > most && !strings.Contains(err.Error(), "4194304 bytes") {
					t.Errorf("%s: %s with %d bytes: %.300v", name, what, size, err)
				}
			}
			check("Execute", err)
			stream, err := rpc.Start(t.Context(), connect.NewRequest(&pb.StartRequest{Config: long}))
			if err == nil {
				stream.Receive()
				err = stream.Err()
				stream.Close()
			}
			check("Start", err)
		}
	}
	got, err := w.rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: config("echo", strings.Repeat("x", 100_000))}))
	if err != nil || len(got.Msg.GetStdout()) != 100_001 {
		t.Errorf("a command that fits: %v", err)
	}
}

func TestStart(t *testing.T) {
	w := newWorld(t)
	begin := func(t *testing.T, req *pb.StartRequest) (*connect.ServerStreamForClient[pb.StartResponse], int32) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		t.Cleanup(cancel)
		stream, err := w.rpc.Start(ctx, connect.NewRequest(req))
		if err != nil {
			t.Fatal(err)
		}
		if !stream.Receive() || stream.Msg().GetInit() == nil {
			t.Fatalf("began with %v, %v", stream.Msg(), stream.Err())
		}
		return stream, stream.Msg().GetInit().GetProcessId()
	}
	rest := func(t *testing.T, stream *connect.ServerStreamForClient[pb.StartResponse]) (text string, exit int32) {
		t.Helper()
		exit = -1
		for stream.Receive() {
			text += string(stream.Msg().GetStdout()) + string(stream.Msg().GetStderr())
			if e := stream.Msg().GetExit(); e != nil {
				exit = e.GetExitCode()
			}
		}
		if stream.Err() != nil {
			t.Fatal(stream.Err())
		}
		return text, exit
	}
	t.Run("input goes in until its end", func(t *testing.T) {
		stream, id := begin(t, &pb.StartRequest{Config: config("cat")})
		for _, part := range []*pb.WriteStdinRequest{
			{ProcessId: id, Payload: &pb.WriteStdinRequest_Input{Input: []byte("one ")}},
			{ProcessId: id, Payload: &pb.WriteStdinRequest_Input{Input: []byte("two")}},
			{ProcessId: id, Payload: &pb.WriteStdinRequest_Eof{Eof: &emptypb.Empty{}}},
		} {
			if _, err := w.rpc.WriteStdin(t.Context(), connect.NewRequest(part)); err != nil {
				t.Fatal(err)
			}
		}
		text, exit := rest(t, stream)
		if diff := cmp.Diff([]any{"one two", int32(0)}, []any{text, exit}); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("a signal ends it", func(t *testing.T) {
		stream, id := begin(t, &pb.StartRequest{Config: config("sleep", "30")})
		if _, err := w.rpc.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{ProcessId: id, Signal: pb.Signal_SIGNAL_SIGTERM})); err != nil {
			t.Fatal(err)
		}
		if _, exit := rest(t, stream); exit != 143 {
			t.Errorf("exit %d", exit)
		}
	})
	t.Run("a terminal has a size, which may change", func(t *testing.T) {
		stream, id := begin(t, &pb.StartRequest{Config: config("/bin/sh", "-c", "stty size; read x; stty size"), Pty: &pb.PTY{Cols: 80, Rows: 24}})
		if !stream.Receive() || !strings.Contains(string(stream.Msg().GetStdout()), "24 80") {
			t.Fatalf("%v", stream.Msg())
		}
		if _, err := w.rpc.ResizeTTY(t.Context(), connect.NewRequest(&pb.ResizeTTYRequest{ProcessId: id, Cols: 100, Rows: 30})); err != nil {
			t.Fatal(err)
		}
		input := &pb.WriteStdinRequest{ProcessId: id, Payload: &pb.WriteStdinRequest_Input{Input: []byte("\n")}}
		if _, err := w.rpc.WriteStdin(t.Context(), connect.NewRequest(input)); err != nil {
			t.Fatal(err)
		}
		if text, _ := rest(t, stream); !strings.Contains(text, "30 100") {
			t.Errorf("%q", text)
		}
	})
	t.Run("a process that there is not, a signal that is none, a terminal without size", func(t *testing.T) {
		_, err := w.rpc.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{ProcessId: 1 << 30, Signal: pb.Signal_SIGNAL_SIGINT}))
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%v", err)
		}
		if _, err = w.rpc.SendSignal(t.Context(), connect.NewRequest(&pb.SendSignalRequest{ProcessId: 1, Signal: 5})); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v", err)
		}
		if _, err = w.rpc.ResizeTTY(t.Context(), connect.NewRequest(&pb.ResizeTTYRequest{ProcessId: 1})); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v", err)
		}
		if _, err = w.rpc.WriteStdin(t.Context(), connect.NewRequest(&pb.WriteStdinRequest{ProcessId: -1})); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v", err)
		}
	})
}

func TestAnEndedSandboxIsNotFound(t *testing.T) {
	w := newWorld(t)
	if _, err := w.manager.Kill(t.Context(), acme, w.box.ID); err != nil {
		t.Fatal(err)
	}
	if status, text := w.ask("GET", "/v1/files/x", ""); status != http.StatusNotFound {
		t.Errorf("%d %s", status, text)
	}
	if _, err := w.rpc.Execute(t.Context(), connect.NewRequest(&pb.ExecuteRequest{Config: config("true")})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("%v", err)
	}
}

// TestHomeIsMade asks a sandbox that has no home yet for it, in every way in which clients write it.
func TestHomeIsMade(t *testing.T) {
	for name, path := range map[string]func(home string) string{
		"nothing":           func(string) string { return "" },
		"a slash":           func(string) string { return "/" },
		"a dot":             func(string) string { return "/." },
		"its path":          func(home string) string { return home },
		"its path, escaped": func(home string) string { return "/" + strings.ReplaceAll(home, "/", "%2F") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if status, text := w.ask("GET", "/v1/files"+path(w.home), ""); status != 200 || !strings.Contains(text, `"entries":[]`) {
				t.Errorf("%d %s", status, text)
			}
		})
	}
	t.Run("not for what only begins like it", func(t *testing.T) {
		w := newWorld(t)
		if status, text := w.ask("GET", "/v1/files"+w.home+"-not", ""); status != 404 {
			t.Errorf("%d %s", status, text)
		}
		if _, err := os.Stat(w.home); !os.IsNotExist(err) {
			t.Errorf("the home was made: %v", err)
		}
	})
}

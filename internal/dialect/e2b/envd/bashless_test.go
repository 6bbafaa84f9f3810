package envd_test

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/envd"
	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb/envdpbconnect"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// lacking has sandboxes without some programs.
type lacking struct {
	*sandbox.Manager
	programs []string
}

func (l lacking) Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	const nowhere = "/bin/there-is-no-such-shell"
	name := params.Argv[0]
	if slices.Contains(l.programs, name) {
		params.Argv = append([]string{nowhere}, params.Argv[1:]...)
	}
	if slices.Contains(l.programs, params.Instead) {
		params.Instead = nowhere
	}
	stream, err := l.Manager.Exec(ctx, p, id, params)
	if err != nil {
		return nil, fault.New(fault.KindOf(err), "%s", strings.ReplaceAll(fault.Message(err), nowhere, name)) // in the agent's words
	}
	return stream, nil
}

func TestCommandsNeedNoBash(t *testing.T) {
	w := newWorld(t)
	client := func(programs ...string) envdpbconnect.ProcessClient {
		h := envd.New(lacking{w.manager, programs}, w.tokens, slog.New(slog.DiscardHandler))
		t.Cleanup(h.Close)
		server := httptest.NewServer(w.edge(h))
		t.Cleanup(server.Close)
		return envdpbconnect.NewProcessClient(server.Client(), server.URL, connect.WithProtoJSON())
	}
	start := func(args ...string) *pb.StartRequest {
		return &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/bash", Args: args}, Stdin: proto.Bool(false)}
	}
	c := client("/bin/bash")

	got, err := run(t, c, start("-l", "-c", "echo $0; exit 3"))
	if err != nil || got.stdout != "/bin/sh\n" || got.end.GetExitCode() != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	if lines := w.logged(); len(lines) == 0 || lines[0].Fields["cmd"] != "echo $0; exit 3" {
		t.Errorf("the log says %+v", lines)
	}

	for name, c := range map[string]struct {
		envdpbconnect.ProcessClient
		req  *pb.StartRequest
		want string
	}{
		"a script for bash is not one for sh": {c, start("script"), "error starting process: /bin/bash: no such file or directory"},
		"a directory that is not there is told first": {c, &pb.StartRequest{Process: &pb.ProcessConfig{
			Cmd: "/bin/bash", Args: []string{"-l", "-c", "pwd"}, Cwd: proto.String("/nowhere")}},
			"error starting process: working directory /nowhere: no such file or directory"},
		"without any shell it is bash that is missing": {client("/bin/bash", "/bin/sh"), start("-l", "-c", "pwd"),
			"error starting process: /bin/bash: no such file or directory"},
	} {
		_, err := run(t, c, c.req)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.HasSuffix(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
)

// errNoServer is no server to speak to.
var errNoServer = errors.New("no server is running here")

// connect finds a server: the one of COVE_URL, else the one that runs on the data directory.
func (a *invocation) connect(ctx context.Context) (*client.Client, error) {
	cfg, err := a.load(nil)
	if err != nil {
		return nil, err
	}
	if url := os.Getenv("COVE_URL"); url != "" {
		key := os.Getenv("COVE_API_KEY")
		if key == "" {
			// Without a key of its own the caller may still be the one who runs the server.
			key, _ = app.LocalKey(cfg.DataDir)
		}
		a.server, a.token = url, key
		return client.New(url, key)
	}
	found, err := app.Find(ctx, cfg.DataDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errNoServer
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w; become its user, or set COVE_URL and COVE_API_KEY", err)
	case err != nil:
		return nil, err
	}
	a.server, a.token = found.URL, cmp.Or(os.Getenv("COVE_API_KEY"), found.APIKey)
	return client.New(found.URL, a.token)
}

// connectOrStart is connect, and where there is no server one of our own for as long as it is needed.
func (a *invocation) connectOrStart(ctx context.Context) (*client.Client, func(), error) {
	c, err := a.connect(ctx)
	if !errors.Is(err, errNoServer) {
		return c, func() {}, err
	}
	cfg, err := a.load(map[string]string{"listen": "127.0.0.1:0", "log.level": "error"})
	if err != nil {
		return nil, nil, err
	}
	cfg.ReadyFile, cfg.Ephemeral = "", true
	server, err := app.Start(ctx, cfg, app.NewLogger(cfg.Log, a.Err), func(line string) { fmt.Fprintln(a.Err, line) })
	if err != nil {
		return nil, nil, err
	}
	a.server, a.own = server.URL, true
	c, err = client.New(server.URL, string(server.Key))
	return c, func() {
		c.Close()
		if err := server.Close(); err != nil {
			fmt.Fprintln(a.Err, "cove: stop the server:", err)
		}
	}, err
}

// idLength is how long the id of a sandbox is; what is shorter is a beginning of one.
const idLength = 26

// living are the states of a sandbox that has not ended.
var living = []string{"starting", "running", "paused", "stopping"}

// find is one of the caller's sandboxes by its id or by a beginning of it that no other has.
func (a *invocation) find(ctx context.Context, c *client.Client, name string) (*client.Sandbox, error) {
	id := name
	if len(name) < idLength {
		var err error
		if id, err = complete(ctx, c, name); err != nil {
			return nil, err
		}
	}
	a.sandbox = id
	return c.Sandbox(id), nil
}

// complete looks among the living first: one that has ended is rarely meant.
func complete(ctx context.Context, c *client.Client, name string) (string, error) {
	if name == "" {
		return "", usageError{errors.New("the id of a sandbox is empty; see `cove ps`")}
	}
	for _, states := range [][]string{living, {"ended"}} {
		var found []string
		for sb, err := range c.List(ctx, client.ListRequest{States: states, Limit: 1000}) {
			if err != nil {
				return "", err
			}
			if strings.HasPrefix(sb.ID, name) {
				found = append(found, sb.ID)
			}
		}
		switch len(found) {
		case 0:
		case 1:
			return found[0], nil
		default:
			return "", fmt.Errorf("%d sandboxes begin with %q; write more of the id:\n%s", len(found), name, strings.Join(found[:min(len(found), 10)], "\n"))
		}
	}
	return "", &client.Error{Kind: client.NotFound, Message: fmt.Sprintf("there is no sandbox %q", name)}
}

// target connects and finds the sandbox that a command is about.
func (a *invocation) target(ctx context.Context, name string) (*client.Client, *client.Sandbox, error) {
	c, err := a.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	sb, err := a.find(ctx, c, name)
	return c, sb, err
}

// each does something to several sandboxes and prints the ids of those with which it went well.
func (a *invocation) each(ctx context.Context, c *client.Client, names []string, do func(*client.Sandbox) error) error {
	done := []client.SandboxInfo{}
	var failed failures
	for _, name := range names {
		sb, err := a.find(ctx, c, name)
		if err == nil {
			err = do(sb)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		done = append(done, sb.SandboxInfo)
	}
	err := a.print(done, func(t *table) {
		for _, sb := range done {
			t.row(sb.ID)
		}
	})
	if len(failed) > 0 {
		return failed
	}
	return err
}

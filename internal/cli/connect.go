package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
)

// errNoServer is no server to speak to.
var errNoServer = errors.New("no server is running here: start one with `cove serve`, or set COVE_URL and COVE_API_KEY")

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
	return client.New(found.URL, cmp.Or(os.Getenv("COVE_API_KEY"), found.APIKey))
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
	c, err = client.New(server.URL, string(server.Key))
	return c, func() {
		c.Close()
		if err := server.Close(); err != nil {
			fmt.Fprintln(a.Err, "cove: stop the server:", err)
		}
	}, err
}

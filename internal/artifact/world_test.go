package artifact_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/sqlstore"
)

// world is a keeper with real parts: an agent, a database and a directory of blobs.
type world struct {
	*artifact.Keeper
	t     testing.TB
	dir   string
	box   artifact.Box
	agent *agentapi.Client
	index *sqlstore.Store
	blobs *local.Store
}

const tenant = "acme"

var defaults = artifact.Config{PublicURL: "http://files.example", LinkTTL: 10 * time.Minute, MaxFileSize: 1 << 20}

func newWorld(t testing.TB, cfg artifact.Config) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	w.box = artifact.Box{Dir: filepath.Join(w.dir, "session", "artifacts")}
	if err := os.MkdirAll(w.box.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w.agent = newAgent(t, w.dir)
	w.start(cfg)
	t.Cleanup(func() { w.stop() })
	return w
}

// start opens the keeper and what is below it, as a server does.
func (w *world) start(cfg artifact.Config) {
	w.t.Helper()
	var err error
	if w.index, err = sqlstore.Open(filepath.Join(w.dir, "cove.db")); err != nil {
		w.t.Fatal(err)
	}
	if w.blobs, err = local.Open(filepath.Join(w.dir, "blobs"), local.Options{}); err != nil {
		w.t.Fatal(err)
	}
	if w.Keeper, err = artifact.New(w.t.Context(), cfg, w.blobs, w.index); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) stop() {
	w.t.Helper()
	for _, stop := range []func() error{w.Keeper.Close, w.blobs.Close, w.index.Close} {
		if err := stop(); err != nil {
			w.t.Error(err)
		}
	}
}

// newAgent is a real agent on the other end of a socket.
func newAgent(t testing.TB, home string) *agentapi.Client {
	t.Helper()
	a, err := agent.New(agent.Config{Boot: agentapi.Boot{ID: "sb1", Workdir: home, Env: map[string]string{"PATH": os.Getenv("PATH")}}, Home: home})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(home, "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { a.HandleConn(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		a.Close()
		serving.Wait()
	})
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", l.Addr().String())
	})
}

// dial reaches the agent.
func (w *world) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(w.dir, "agent.sock"))
}

// put leaves a file in the box.
func (w *world) put(name, content string) {
	w.t.Helper()
	to := filepath.Join(w.box.Dir, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(to, []byte(content), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// collect collects the box as one run of session s1.
func (w *world) collect(run string) []artifact.Artifact {
	w.t.Helper()
	return w.collectAs(tenant, artifact.Origin{Session: "s1", Key: "chat-1", Sandbox: "sb1", Run: run, Cell: 1})
}

func (w *world) collectAs(tenant string, o artifact.Origin) []artifact.Artifact {
	w.t.Helper()
	list, err := w.Collect(w.t.Context(), w.agent, tenant, o, w.box)
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

// left is what lies in the box.
func (w *world) left() []string {
	w.t.Helper()
	return tree(w.t, w.box.Dir)
}

// tree lists what is below a directory, directories with a slash.
func tree(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if e.IsDir() {
			rel += "/"
		}
		names = append(names, rel)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// stored is how many blobs there are.
func (w *world) stored() (refs []artifact.Ref) {
	w.t.Helper()
	for r, err := range w.blobs.All() {
		if err != nil {
			w.t.Fatal(err)
		}
		refs = append(refs, r)
	}
	return refs
}

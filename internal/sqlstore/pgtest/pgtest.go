// Package pgtest runs a real Postgres for tests: one for each test binary, that listens nowhere but on a socket of its own and
// ends with it.
package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver of the pool that makes databases
)

// Server is a Postgres of its own.
type Server struct {
	dir  string
	bin  string
	cred *syscall.Credential // who it runs as; nil: as we do
	log  bytes.Buffer

	stop func()
	died chan struct{}
}

var (
	mu     sync.Mutex
	shared *Server
)

// Main runs a package's tests and ends the Postgres that they used. Call it from TestMain.
func Main(m *testing.M) {
	code := m.Run()
	mu.Lock()
	defer mu.Unlock()
	if shared != nil {
		shared.Close()
	}
	os.Exit(code)
}

// URL is that of a place of its own in the package's Postgres, which the first caller starts: an empty schema, since a whole
// database takes a hundred times as long to make.
func URL(t testing.TB) string {
	t.Helper()
	mu.Lock()
	defer mu.Unlock()
	if shared == nil {
		s, err := Start()
		if err != nil {
			t.Fatalf("start a Postgres for this test: %v", err)
		}
		shared = s
	}
	name := newName()
	if err := shared.do(t.Context(), "CREATE SCHEMA "+name); err != nil {
		t.Fatalf("make a schema for this test: %v", err)
	}
	return shared.url(system, "search_path", name)
}

// Start makes a cluster in a directory of its own and waits until it answers. Close it.
func Start() (_ *Server, err error) {
	s := &Server{died: make(chan struct{})}
	if s.bin, err = binaries(); err != nil {
		return nil, err
	}
	// Not the test's own directory: a socket's path has at most 107 bytes, and another user must come through.
	if s.dir, err = os.MkdirTemp("", "cove-pg-"); err != nil {
		return nil, err
	}
	if err := errors.Join(s.become(), s.init(), s.run()); err != nil {
		return nil, errors.Join(err, os.RemoveAll(s.dir))
	}
	if err := s.answer(); err != nil {
		s.Close()
		return nil, fmt.Errorf("%w\n%s", err, s.log.String())
	}
	return s, nil
}

// binaries is where Postgres's programs are; distributions keep them out of the PATH.
func binaries() (dir string, err error) {
	if p, err := exec.LookPath("initdb"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil {
			return filepath.Dir(p), nil
		}
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(found) == 0 {
		return "", errors.New("there is no initdb on this host: install the package postgresql")
	}
	return found[len(found)-1], nil
}

// become finds somebody else to be where we are root, whom Postgres refuses.
func (s *Server) become() error {
	if os.Geteuid() != 0 {
		return nil
	}
	who, err := user.Lookup("postgres")
	if err != nil {
		who = &user.User{Uid: "65534", Gid: "65534"}
	}
	uid, errU := strconv.ParseUint(who.Uid, 10, 32)
	gid, errG := strconv.ParseUint(who.Gid, 10, 32)
	if err := errors.Join(errU, errG); err != nil {
		return err
	}
	s.cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return os.Chown(s.dir, int(uid), int(gid))
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	c := exec.Command(filepath.Join(s.bin, name), args...)
	c.Dir, c.Stdout, c.Stderr = s.dir, &s.log, &s.log
	c.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred, Setpgid: true}
	return c
}

const owner = "cove"

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) init() error {
	// A language's order of text, as an operator's database may have: what needs another must say so.
	err := s.command("initdb", "--pgdata="+s.data(), "--username="+owner, "--auth=trust", "--encoding=UTF8", "--locale-provider=icu", "--icu-locale=en", "--no-sync").Run()
	if err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, s.log.String())
	}
	return nil
}

// run starts the server from a thread that lives as long as it: should this process be killed, the kernel ends the server with
// that thread.
func (s *Server) run() error {
	c := s.command("postgres", "-D", s.data(), "-k", s.dir, "-c", "listen_addresses=", "-c", "fsync=off", "-c", "full_page_writes=off",
		"-c", "synchronous_commit=off", "-c", "shared_buffers=16MB", "-c", "max_connections=100", "-c", "deadlock_timeout=100ms", "-c", "autovacuum=off")
	c.SysProcAttr.Pdeathsig = syscall.SIGQUIT
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer close(s.died)
		err := c.Start()
		started <- err
		if err == nil {
			_ = c.Wait() // it ends by our signal
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	s.stop = func() { _ = c.Process.Signal(syscall.SIGQUIT) } // at once: nobody needs what it has
	return nil
}

func (s *Server) answer() error {
	db, err := sql.Open("pgx", s.url(system))
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second) // of the start, which has no caller to stop it
	defer cancel()
	for {
		if err = db.PingContext(ctx); err == nil || ctx.Err() != nil {
			return err
		}
		select {
		case <-s.died:
			return errors.New("postgres ended at its start")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// system is the database that every cluster has.
const system = "postgres"

// url is that of a database, with further settings.
func (s *Server) url(database string, settings ...string) string {
	q := url.Values{"host": {s.dir}, "user": {owner}}
	for i := 0; i < len(settings); i += 2 {
		q.Set(settings[i], settings[i+1])
	}
	return (&url.URL{Scheme: "postgres", Path: "/" + database, RawQuery: q.Encode()}).String()
}

func newName() string { return "t_" + strings.ToLower(rand.Text()[:12]) }

func (s *Server) do(ctx context.Context, query string) error {
	db, err := sql.Open("pgx", s.url(system))
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.ExecContext(ctx, query)
	return err
}

// Create makes an empty database and returns its URL.
func (s *Server) Create(ctx context.Context) (string, error) {
	name := newName()
	if err := s.do(ctx, "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	return s.url(name), nil
}

// Close ends the server and removes what it kept.
func (s *Server) Close() {
	s.stop()
	<-s.died
	_ = os.RemoveAll(s.dir)
}

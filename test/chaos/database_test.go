package chaos_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver by which another process locks the database

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
	"github.com/covehq/cove/test/testserver"
)

// withoutDatabase is what clients may see while the database is away: a sentence with 503. Never a 500, never silence.
var withoutDatabase = []string{"ok", "503", "stream-unavailable"}

// database takes the database away under load and brings it back. Meanwhile nothing new is made, and what lives is usable.
func (f *fault) database(s *testserver.Server, away, back func()) {
	f.Helper()
	residents := f.settle(s, 2, client.CreateRequest{})
	before := f.count(s, residents)
	work := f.workload(s, clients)
	f.moment(time.Second)
	away()
	f.eventually("/readyz says that the database is away", soon, func() bool {
		code, _ := f.ready(s)
		return code == http.StatusServiceUnavailable
	})
	f.eventually("a create is refused", soon, func() bool { return f.refused(s) })
	for _, r := range residents {
		sb := s.Sandbox(r.id)
		if err := f.ask(func(ctx context.Context) error { return wants(ctx, sb, "kept", "'"+r.secret+"'") }); err != nil {
			f.Errorf("a living sandbox cannot be used while the database is away: %v", err)
		}
	}
	back()
	began := time.Now()
	f.serves(s, began, soon)
	f.eventually("/readyz says that all is well", soon, func() bool {
		code, _ := f.ready(s)
		return code == http.StatusOK
	})
	work.end()
	f.stillThere(s, residents)
	f.onlySaw(withoutDatabase...)
	f.nothingLeft(s, residents, before)
}

// refused tries a create and notes how long the refusal took. A refusal that is no 503 with a sentence and a time to try
// again fails the fault.
func (f *fault) refused(s *testserver.Server) bool {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/cove/v1/sandboxes", strings.NewReader("{}"))
	if err != nil {
		f.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.Key)
	begun := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		f.Errorf("a create got no answer: %v", err)
		return true
	}
	defer resp.Body.Close()
	var body client.ErrorBody
	_ = json.NewDecoder(resp.Body).Decode(&body) // an answer without a sentence fails below
	if resp.StatusCode == http.StatusCreated {
		return false
	}
	f.note("a create was refused after %.1fs: %d %s", time.Since(begun).Seconds(), resp.StatusCode, body.Error.Message)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || body.Error.Message == "" {
		f.Errorf("a create is refused with %d, Retry-After %q, %q", resp.StatusCode, resp.Header.Get("Retry-After"), body.Error.Message)
	}
	return true
}

// databaseFile is a file of the server's SQLite database.
func databaseFile(s *testserver.Server, suffix string) string {
	return filepath.Join(s.Dir, "server", "cove.db"+suffix)
}

func TestDatabaseLocked(t *testing.T) {
	f := begin(t, "SQLite: locked by another process")
	s := testserver.New(f)
	db, err := sql.Open("sqlite", "file:"+databaseFile(s, "")+"?_pragma=busy_timeout(30000)")
	if err != nil {
		f.Fatal(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	do := func(query string) func() {
		return func() {
			if _, err := db.ExecContext(f.Context(), query); err != nil {
				f.Fatalf("%s: %v", query, err)
			}
		}
	}
	f.database(s, do("BEGIN EXCLUSIVE"), do("ROLLBACK"))
}

// TestDatabaseReadOnly makes the files immutable, which holds for a process that has them open, too.
func TestDatabaseReadOnly(t *testing.T) {
	f := begin(t, "SQLite: files that cannot be written")
	s := testserver.New(f)
	set := func(on bool) {
		for _, suffix := range []string{"", "-wal"} {
			if err := immutable(databaseFile(s, suffix), on); err != nil {
				f.Fatalf("make %s immutable %v: %v", suffix, on, err)
			}
		}
	}
	if err := immutable(databaseFile(s, ""), false); err != nil {
		t.Skipf("this file system has no immutable files: %v", err)
	}
	f.Cleanup(func() { set(false) })
	f.database(s, func() { set(true) }, func() { set(false) })
}

// immutableFlag is FS_IMMUTABLE_FL of linux/fs.h, which the package unix does not have.
const immutableFlag = 0x10

func immutable(path string, on bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	flags, err := unix.IoctlGetUint32(int(file.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	flags &^= immutableFlag
	if on {
		flags |= immutableFlag
	}
	return unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, int(flags))
}

// TestDatabaseGone: a database that is removed is lost with the next start, but the server, its templates and the host are
// not, and nothing of what it knew is left over.
func TestDatabaseGone(t *testing.T) {
	f := begin(t, "SQLite: files removed, then kill -9 and a start")
	s := testserver.New(f)
	before := allowing(f.count(s, nil), 1) // the first pool has one kernel less than a later one
	residents := f.settle(s, 2, client.CreateRequest{})
	work := f.workload(s, clients)
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if err := os.Remove(databaseFile(s, suffix)); err != nil {
			f.Fatal(err)
		}
	}
	f.serves(s, time.Now(), soon)
	f.stillThere(s, residents)
	s.Crash(f)
	began := time.Now()
	work.end()
	s.Start(f)
	f.serves(s, began, soon)
	f.onlySaw(atWork...)
	f.note("the %d sandboxes that lived are ended: the server has no row of them", len(residents))
	f.nothingLeft(s, nil, before)
}

// TestWALCut takes the newer half of the write-ahead log away, as a host may that lost power.
func TestWALCut(t *testing.T) {
	f := begin(t, "SQLite: the write-ahead log cut in half after kill -9")
	s := testserver.New(f)
	before := allowing(f.count(s, nil), 1) // the first pool has one kernel less than a later one
	residents := f.settle(s, 3, client.CreateRequest{})
	s.Crash(f)
	wal, err := os.Stat(databaseFile(s, "-wal"))
	if err != nil {
		f.Fatal(err)
	}
	if err := os.Truncate(databaseFile(s, "-wal"), wal.Size()/2); err != nil {
		f.Fatal(err)
	}
	began := time.Now()
	s.Start(f)
	f.serves(s, began, soon)
	kept := 0
	for _, r := range residents {
		sb, err := s.Get(f.Context(), r.id)
		if err != nil || sb.State != "running" {
			continue
		}
		kept++
		f.stillThere(s, []resident{r})
		_ = sb.Kill(f.Context())
	}
	f.note("%d of %d sandboxes still had a row, and the others are ended", kept, len(residents))
	f.nothingLeft(s, nil, before)
}

// TestBlobDamaged: a kept file whose bytes changed on the disk is refused or cut off, and no client takes it for what it kept.
func TestBlobDamaged(t *testing.T) {
	f := begin(t, "blobs: one byte changed, one file removed, one cut in half")
	s := testserver.New(f)
	ctx := f.Context()
	if _, err := s.OpenSession(ctx, "kept", client.SessionRequest{}); err != nil {
		f.Fatal(err)
	}
	const code = `import os
for name in ("whole", "changed", "removed", "cut"):
    open(f"/session/artifacts/{name}", "wb").write(os.urandom(3 << 20))`
	out, err := s.RunInSession(ctx, "kept", client.SessionRunRequest{Code: code}, "")
	if err != nil || len(out.Artifacts) != 4 {
		f.Fatalf("artifacts before the fault: %v, %+v", err, out)
	}
	damage := map[string]func(path string) error{
		"removed": os.Remove,
		"cut":     func(path string) error { return os.Truncate(path, 1<<20) },
		"changed": func(path string) error {
			file, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err == nil {
				_, err = file.WriteAt([]byte("damaged"), 2<<20)
			}
			return errors.Join(err, file.Close())
		},
	}
	for _, a := range out.Artifacts {
		if do := damage[a.Name]; do != nil {
			if err := do(f.blob(s, a.SHA256)); err != nil {
				f.Fatal(err)
			}
		}
	}
	for _, a := range out.Artifacts {
		_, body, err := s.ReadArtifact(ctx, a.ID)
		n := int64(0)
		if err == nil {
			n, err = io.Copy(io.Discard, body)
			_ = body.Close()
		}
		f.saw(status(err))
		switch {
		case a.Name == "whole" && err != nil:
			f.lost("an artifact that was not damaged: %v", err)
		case a.Name != "whole" && err == nil:
			f.Errorf("a client took an artifact that was %s for what it kept", a.Name)
		case err != nil:
			f.note("%s: %d bytes, then %.160v", a.Name, n, err)
		}
	}
	f.serves(s, time.Now(), soon)
	f.onlySaw("ok", "410", "500", "cut") // 500 says that the content is damaged on the server, which is its defect
}

// blob finds the file of a content.
func (f *fault) blob(s *testserver.Server, sha256 string) (found string) {
	f.Helper()
	_ = filepath.WalkDir(filepath.Join(s.Dir, "server"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(strings.ReplaceAll(path, "/", ""), sha256) {
			found = path
		}
		return nil
	})
	if found == "" {
		f.Fatalf("there is no file of the content %s", sha256)
	}
	return found
}

// postgres is a Postgres whose processes a fault may stop.
type postgres struct {
	dir string
	url string
}

func (f *fault) postgres() postgres {
	f.Helper()
	pg, err := pgtest.Start()
	if err != nil {
		f.Fatalf("start a Postgres: %v", err)
	}
	f.Cleanup(pg.Close)
	at, err := pg.Create(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	u, err := url.Parse(at)
	if err != nil {
		f.Fatal(err)
	}
	dir := u.Query().Get("host")
	if err := os.Chmod(dir, 0o755); err != nil { // the server becomes another user and must come through
		f.Fatal(err)
	}
	return postgres{dir, at}
}

// main is the process that the others are children of.
func (p postgres) main(f *fault) int {
	f.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, "data", "postmaster.pid"))
	if err != nil {
		f.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil {
		f.Fatal(err)
	}
	return pid
}

// signal reaches the main process and its children.
func (p postgres) signal(f *fault, sig syscall.Signal) {
	f.Helper()
	main := p.main(f)
	_ = syscall.Kill(main, sig)
	for _, pid := range testserver.Processes() {
		if testserver.Status(pid, "PPid") == strconv.Itoa(main) {
			_ = syscall.Kill(pid, sig) // it may have ended
		}
	}
}

func TestPostgresHangs(t *testing.T) {
	f := begin(t, "Postgres: all its processes SIGSTOP under load")
	pg := f.postgres()
	s := testserver.New(f, "COVE_DATABASE_URL="+pg.url)
	f.Cleanup(func() { pg.signal(f, syscall.SIGCONT) })
	f.database(s, func() { pg.signal(f, syscall.SIGSTOP) }, func() { pg.signal(f, syscall.SIGCONT) })
}

func TestPostgresStopped(t *testing.T) {
	f := begin(t, "Postgres: stopped and started under load")
	pg := f.postgres()
	s := testserver.New(f, "COVE_DATABASE_URL="+pg.url)
	argv := strings.Split(testserver.Cmdline(pg.main(f)), "\x00")
	owner, err := os.Stat(filepath.Join(pg.dir, "data"))
	if err != nil {
		f.Fatal(err)
	}
	who := owner.Sys().(*syscall.Stat_t)
	f.database(s, func() {
		main := pg.main(f)
		f.kill(main, syscall.SIGINT) // fast shutdown: connections are cut
		f.eventually("Postgres has ended", soon, func() bool {
			state := testserver.Status(main, "State")
			return state == "" || strings.HasPrefix(state, "Z")
		})
	}, func() {
		again := exec.Command(argv[0], argv[1:]...)
		again.Dir = pg.dir
		again.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
		again.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: who.Uid, Gid: who.Gid}}
		if err := again.Start(); err != nil {
			f.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			_ = again.Wait() // it ends with the fault
			close(ended)
		}()
		f.Cleanup(func() {
			_ = again.Process.Signal(syscall.SIGQUIT)
			<-ended
		})
	})
}

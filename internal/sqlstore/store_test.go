package sqlstore_test

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func open(t testing.TB, path string) *sqlstore.Store {
	t.Helper()
	s, err := sqlstore.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestContract(t *testing.T) { onEach(t, storetest.Run) }

func record(id string) sandbox.Record {
	return sandbox.Record{Sandbox: sandbox.Sandbox{
		ID: id, Tenant: "acme", Template: "python", State: sandbox.StateStarting, CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
		Network: policy.Network{Mode: policy.Internet}, Storage: sandbox.StorageVolatile,
	}}
}

func TestOpen(t *testing.T) {
	t.Run("what was stored is there after the next open", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "odd name?#%.db")
		s, err := sqlstore.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Insert(t.Context(), record("sb1")); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := open(t, path).Get(t.Context(), "sb1"); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("what was stored is there although nobody closed the database", func(t *testing.T) {
		dir := t.TempDir()
		if err := open(t, filepath.Join(dir, "cove.db")).Insert(t.Context(), record("sb1")); err != nil {
			t.Fatal(err)
		}
		copied := t.TempDir() // as a kill -9 leaves it: the main file and its log
		for _, name := range []string{"cove.db", "cove.db-wal"} {
			b, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(copied, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := open(t, filepath.Join(copied, "cove.db")).Get(t.Context(), "sb1"); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a database of the first schema is brought up to date", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "cove.db")
		first, err := os.ReadFile("migrations/0001_sandboxes.sql")
		if err != nil {
			t.Fatal(err)
		}
		db, err := sql.Open("sqlite", path)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := db.Exec(string(first) + `;
			INSERT INTO sandboxes VALUES (1, 'sb1', 'acme', 'python', 'd1', '', '', '', 'boot-1', 'running',
				1, 2, 3, 0, 4, 5, '{}', '{"a":"b"}', '{"mode":"internet"}', 'volatile', '', '', '{}');
			PRAGMA user_version = 1`); err != nil {
			t.Fatal(err)
		}
		got, err := open(t, path).Get(t.Context(), "sb1")
		if err != nil {
			t.Fatal(err)
		}
		want := sandbox.Record{Sandbox: sandbox.Sandbox{
			ID: "sb1", Tenant: "acme", Template: "python", TemplateDigest: "d1", State: sandbox.StateRunning,
			CreatedAt: time.UnixMicro(1).UTC(), StartedAt: time.UnixMicro(2).UTC(), Deadline: time.UnixMicro(3).UTC(), LastUsed: time.UnixMicro(4).UTC(),
			IdleTimeout: 5, IdleAction: sandbox.IdleKill, DeadlineAction: sandbox.IdleKill, Metadata: map[string]string{"a": "b"},
			Network: policy.Network{Mode: policy.Internet}, Storage: sandbox.StorageVolatile,
		}, BootID: "boot-1"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
	})
	t.Run("only its owner may read the file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "cove.db")
		open(t, path)
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("mode is %v, %v", info.Mode(), err)
		}
	})
	for name, c := range map[string]struct {
		make func(t *testing.T, path string)
		kind fault.Kind
		says string
	}{
		"a newer schema is refused": {func(t *testing.T, path string) {
			open(t, path)
			db, err := sql.Open("sqlite", path)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if _, err := db.Exec("PRAGMA user_version = 999"); err != nil {
				t.Fatal(err)
			}
		}, fault.Unsupported, "newer Cove"},
		"a file that is no database is refused": {func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(strings.Repeat("not a database ", 1000)), 0o600); err != nil {
				t.Fatal(err)
			}
		}, fault.Invalid, "damaged or is not a database"},
		"a damaged database is refused": {func(t *testing.T, path string) {
			s, err := sqlstore.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 200 {
				if err := s.Insert(t.Context(), record(fmt.Sprintf("sb%d", i))); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte(strings.Repeat("x", 20000)), 8192); err != nil {
				t.Fatal(err)
			}
		}, fault.Invalid, "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "cove.db")
			c.make(t, path)
			_, err := sqlstore.Open(path)
			if !fault.Is(err, c.kind) || !strings.Contains(fault.Message(err), c.says) || !strings.Contains(fault.Message(err), path) {
				t.Fatalf("error is %v (%s)", err, fault.KindOf(err))
			}
		})
	}
	t.Run("a directory that is not there is told", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "missing", "cove.db")
		if _, err := sqlstore.Open(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Fatalf("error is %v", err)
		}
	})
}

func TestCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	s := open(t, path)
	if err := s.Insert(t.Context(), record("sb1")); err != nil {
		t.Fatal(err)
	}
	size := func() int64 {
		info, err := os.Stat(path + "-wal")
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	// Every save grows the log until a checkpoint beside the writer has caught up with it: then it begins anew and keeps
	// its size. A checkpoint catches up when the writer pauses, so give it a pause, and more of them on a busy host.
	for range 20 {
		for range 255 { // the insert or the save below is the 256th commit
			if err := s.Save(t.Context(), record("sb1")); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond)
		before := size()
		if err := s.Save(t.Context(), record("sb1")); err != nil {
			t.Fatal(err)
		}
		if size() == before && before > 0 {
			return
		}
	}
	t.Fatalf("the log has %d bytes and still grows", size())
}

// The create path does one Insert and one Save.
func BenchmarkCreatePath(b *testing.B) {
	for name, open := range databases {
		b.Run(name, func(b *testing.B) {
			s := open(b)
			i := 0
			for b.Loop() {
				i++
				r := record(fmt.Sprintf("sb%d", i))
				event := sandbox.LifecycleEvent{Sandbox: r.ID, Tenant: r.Tenant, Type: sandbox.LifecycleCreated, At: r.CreatedAt}
				if err := s.Insert(b.Context(), r, event); err != nil {
					b.Fatal(err)
				}
				r.State = sandbox.StateRunning
				if err := s.Save(b.Context(), r, event); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

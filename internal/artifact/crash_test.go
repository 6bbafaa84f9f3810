package artifact_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/sqlstore"
)

// The server of TestCrash is this test's own binary, told by the environment to be one.
const (
	crashDir   = "COVE_TEST_CRASH_DIR"
	crashAt    = "COVE_TEST_CRASH_AT"    // name of a step
	crashAfter = "COVE_TEST_CRASH_AFTER" // so many of it
)

// crashFiles are what lies in the box: two of them are the same, and one is nested.
var crashFiles = map[string]string{"a.txt": "aaaa", "b/nested.txt": "same", "c.txt": "same", "d.bin": strings.Repeat("d", 200_000)}

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		os.Exit(server(dir))
	}
	os.Exit(m.Run())
}

// server collects a box once and dies of SIGKILL at the step it was told.
func server(dir string) int {
	number, _ := strconv.Atoi(os.Getenv(crashAfter))
	var after atomic.Int64
	after.Store(int64(number))
	cfg := defaults
	cfg.Step = func(step string) {
		if step != os.Getenv(crashAt) {
			return
		}
		if after.Add(-1) == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // until it arrives
		}
	}
	t := &standalone{}
	w := &world{t: t, dir: dir, box: artifact.Box{Dir: filepath.Join(dir, "session", "artifacts")}}
	w.agent = newAgent(t, dir)
	w.start(cfg)
	w.collect("run1")
	fmt.Println("collected")
	return 0
}

// standalone is a test that is a process: what fails ends it.
type standalone struct{ testing.TB }

func (*standalone) Helper()                  {}
func (*standalone) Cleanup(func())           {}
func (*standalone) Context() context.Context { return context.Background() } // a process ends by itself
func (*standalone) Fatal(args ...any) {
	fmt.Fprintln(os.Stderr, args...)
	os.Exit(1)
}

// TestCrash kills a server with SIGKILL between any two steps of keeping files. The server after it finds no row without a
// blob, loses no file, and leaves neither temporary files nor blobs that nobody names.
func TestCrash(t *testing.T) {
	counts := map[string]int{"draft": 4, "written": 4, "placed": 4, "committed": 1, "discarded": 1}
	for step, most := range counts {
		for n := 1; n <= most; n++ {
			t.Run(fmt.Sprintf("after %s %d", step, n), func(t *testing.T) {
				t.Parallel()
				crash(t, step, n)
			})
		}
	}
}

func crash(t *testing.T, step string, n int) {
	dir := t.TempDir()
	w := &world{t: t, dir: dir, box: artifact.Box{Dir: filepath.Join(dir, "session", "artifacts")}}
	for name, content := range crashFiles {
		w.put(name, content)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+dir, crashAt+"="+step, fmt.Sprintf("%s=%d", crashAfter, n))
	out, err := cmd.CombinedOutput()
	if state := cmd.ProcessState; state == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the server did not die of SIGKILL: %v: %s", err, out)
	}
	if err := os.Remove(filepath.Join(dir, "agent.sock")); err != nil {
		t.Fatal(err)
	}
	intact(t, dir)

	w.agent = newAgent(t, dir)
	w.start(defaults)
	defer w.stop()
	if left := tree(t, filepath.Join(dir, "blobs", "tmp")); left != nil {
		t.Errorf("temporary files are left: %q", left)
	}
	if _, err := w.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, r := range w.stored() {
		if named, err := w.index.BlobNamed(t.Context(), r); err != nil || !named {
			t.Errorf("a blob that nobody names is left: %v", err)
		}
	}
	w.collect("run2")
	page, err := w.List(t.Context(), tenant, artifact.Query{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, a := range page.Artifacts {
		got[a.Path] = w.read(a)
	}
	if diff := cmp.Diff(crashFiles, got); diff != "" {
		t.Error("files were lost:", diff)
	}
	if len(page.Artifacts) != len(crashFiles) {
		t.Errorf("%d artifacts of %d files: some were kept twice", len(page.Artifacts), len(crashFiles))
	}
	if left := w.left(); left != nil {
		t.Errorf("left in the box: %q", left)
	}
}

// intact looks at what the dead server has left before anything could repair it: every row has its blob, whole, and every
// file has a row or is still in the box.
func intact(t *testing.T, dir string) {
	t.Helper()
	index, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()
	page, err := index.Artifacts(t.Context(), tenant, artifact.Query{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	have := tree(t, filepath.Join(dir, "session", "artifacts"))
	for _, a := range page.Artifacts {
		content, err := os.ReadFile(filepath.Join(dir, "blobs", "t-"+tenant, a.SHA256[:2], a.SHA256))
		if err != nil || sum(string(content)) != a.SHA256 {
			t.Errorf("a row without its blob: %s: %v", a.Path, err)
		}
		have = append(have, a.Path)
	}
	for name := range crashFiles {
		if !slices.Contains(have, name) {
			t.Errorf("%s is neither in the box nor kept", name)
		}
	}
}

// TestHalfABlob: a server that is killed while it writes a small blob leaves a part of it under its name. Whoever keeps the same
// bytes makes it whole, and a sweep removes one that nobody names.
func TestHalfABlob(t *testing.T) {
	w := newWorld(t, defaults)
	wanted, unwanted := "wanted by a file", "wanted by nobody"
	for _, content := range []string{wanted, unwanted} {
		at := w.blobFile(artifact.Artifact{Tenant: tenant, SHA256: sum(content)})
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(content[:6]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w.stop()
	w.put("a.txt", wanted)
	w.start(defaults)
	list := w.collect("run1")
	if len(list) != 1 || w.read(list[0]) != wanted {
		t.Errorf("%+v", list)
	}
	if _, err := w.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]artifact.Ref{{Tenant: tenant, SHA256: sum(wanted)}}, w.stored()); diff != "" {
		t.Error(diff)
	}

	// The other one, which nobody has sent again since, is gone and comes anew.
	w.put("b.txt", unwanted)
	if list := w.collect("run2"); len(list) != 1 || w.read(list[0]) != unwanted {
		t.Errorf("%+v", list)
	}
}

// TestPowerLoss: of what was kept in the last moments before the host went down, what is whole stays, and what is not is
// forgotten rather than named.
func TestPowerLoss(t *testing.T) {
	w := newWorld(t, defaults)
	for name, content := range map[string]string{"empty": "emptied", "gone": "removed", "old": "older", "whole": "whole"} {
		w.put(name, content)
	}
	list := w.collect("run1")
	w.stop()
	w.spoilMark()
	if err := os.Truncate(w.blobFile(list[0]), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(w.blobFile(list[1])); err != nil {
		t.Fatal(err)
	}
	w.start(defaults)
	page, err := w.List(t.Context(), tenant, artifact.Query{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, a := range page.Artifacts {
		got = append(got, a.Name+" "+w.read(a))
	}
	if diff := cmp.Diff([]string{"whole whole", "old older"}, got); diff != "" {
		t.Error(diff)
	}
}

// spoilMark is what a loss of power does to the mark: it was never written.
func (w *world) spoilMark() {
	w.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(w.dir, "cove.db"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec("UPDATE artifact_settled SET seq = 0"); err != nil {
		w.t.Fatal(err)
	}
}

// TestDiskTrouble: when a blob cannot be written nothing is lost and nothing is left.
func TestDiskTrouble(t *testing.T) {
	w := newWorld(t, defaults)
	w.put("a.txt", strings.Repeat("a", 200_000)) // more than a draft holds in memory
	for name, spoil := range map[string]func() (repair func()){
		"no room for a draft": func() func() {
			tmp := filepath.Join(w.dir, "blobs", "tmp")
			if err := os.Remove(tmp); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := os.Mkdir(tmp, 0o700); err != nil {
					t.Fatal(err)
				}
			}
		},
		"no place for a blob": func() func() {
			at := filepath.Join(w.dir, "blobs", "t-"+tenant)
			if err := os.WriteFile(at, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := os.Remove(at); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			repair := spoil()
			list, err := w.Collect(t.Context(), w.agent, tenant, artifact.Origin{Session: "s1", Run: "run1"}, w.box)
			if err == nil {
				t.Errorf("%+v", list)
			}
			repair()
			if diff := cmp.Diff([]string{"a.txt"}, w.left()); diff != "" {
				t.Error(diff)
			}
			if left := tree(t, filepath.Join(w.dir, "blobs", "tmp")); left != nil {
				t.Errorf("temporary files are left: %q", left)
			}
		})
	}
	if list := w.collect("run2"); len(list) != 1 || list[0].ID == "" {
		t.Errorf("%+v", list)
	}
}

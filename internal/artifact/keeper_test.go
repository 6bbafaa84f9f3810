package artifact_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
)

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// unsteady are fields that differ from run to run; each has a test of its own.
var unsteady = cmpopts.IgnoreFields(artifact.Artifact{}, "ID", "Created", "Source")

func (w *world) read(a artifact.Artifact) string {
	w.t.Helper()
	_, c, err := w.Open(w.t.Context(), a.Tenant, a.ID)
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

func TestCollect(t *testing.T) {
	t.Run("S4.89 S4.94 S4.95 what a run leaves is kept with its origin and removed from the box", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("data.csv", "a,b\n1,2\n")
		o := artifact.Origin{Session: "s1", Key: "chat-1", Sandbox: "sb1", Run: "run1", Cell: 3, ToolCall: "call_1",
			Datasets: []artifact.Dataset{{ID: "sales", SHA256: sum("x")}, {ID: "host"}}}
		before := time.Now().Add(-time.Millisecond)
		list := w.collectAs(tenant, o)
		seen := o.Datasets
		o.Datasets = nil // they are asked for
		want := []artifact.Artifact{{Tenant: tenant, Name: "data.csv", Path: "data.csv", MIME: "text/csv", Size: 8, SHA256: sum("a,b\n1,2\n"), Origin: o}}
		if diff := cmp.Diff(want, list, unsteady); diff != "" {
			t.Fatal(diff)
		}
		if !regexp.MustCompile(`^art_[0-9a-f]{32}$`).MatchString(list[0].ID) || list[0].Created.Before(before) || list[0].Created.After(time.Now()) {
			t.Errorf("id %q, created %v", list[0].ID, list[0].Created)
		}
		got, err := w.Get(t.Context(), tenant, list[0].ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(list[0], got); diff != "" {
			t.Error("it is known as something else:", diff)
		}
		from, err := w.Datasets(t.Context(), tenant, got.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(seen, from); diff != "" {
			t.Error("it was made from something else:", diff)
		}
		if _, err := w.Datasets(t.Context(), "umbrella", got.ID); !fault.Is(err, fault.NotFound) {
			t.Error("another tenant learns from what:", err)
		}
		if w.read(got) != "a,b\n1,2\n" {
			t.Error("other bytes")
		}
		if left := w.left(); left != nil {
			t.Errorf("left in the box: %q", left)
		}
	})
	t.Run("S4.90 D10 nested, overwritten and equally named files are all kept, each with its path", func(t *testing.T) {
		w := newWorld(t, defaults)
		for _, name := range []string{"out.txt", "a/out.txt", "a/b/out.txt", "c/out.txt"} {
			w.put(name, "first "+name)
		}
		var paths []string
		for _, a := range w.collect("run1") {
			paths = append(paths, a.Path)
			if a.Name != "out.txt" || w.read(a) != "first "+a.Path {
				t.Errorf("%+v", a)
			}
		}
		if diff := cmp.Diff([]string{"a/b/out.txt", "a/out.txt", "c/out.txt", "out.txt"}, paths); diff != "" {
			t.Fatal(diff)
		}
		if left := w.left(); left != nil {
			t.Errorf("left in the box: %q", left)
		}
		w.put("a/out.txt", "second")
		list := w.collect("run2")
		if len(list) != 1 || list[0].Path != "a/out.txt" || list[0].Run != "run2" || w.read(list[0]) != "second" {
			t.Errorf("%+v", list)
		}
	})
	t.Run("S4.91 S4.93 the same bytes are stored once, under their digest", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("one.bin", "same")
		w.put("two.bin", "same")
		w.collect("run1")
		w.put("three.bin", "same")
		w.collect("run2")
		s := sum("same")
		if diff := cmp.Diff([]string{"t-acme/", "t-acme/" + s[:2] + "/", "t-acme/" + s[:2] + "/" + s, "tmp/"},
			tree(t, filepath.Join(w.dir, "blobs"))); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("S4.92 equal bytes keep their own names and types, and no tenant meets another", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("one.txt", "1,2\n")
		w.put("two.csv", "1,2\n")
		mine := w.collect("run1")
		w.put("three.md", "1,2\n")
		theirs := w.collectAs("umbrella", artifact.Origin{Session: "s2", Run: "run2"})
		var got []string
		for _, a := range append(mine, theirs...) {
			got = append(got, a.Tenant+" "+a.Name+" "+a.MIME)
		}
		if diff := cmp.Diff([]string{"acme one.txt text/plain", "acme two.csv text/csv", "umbrella three.md text/markdown"}, got); diff != "" {
			t.Error(diff)
		}
		if len(w.stored()) != 2 {
			t.Errorf("%d blobs: tenants share one, or one has two", len(w.stored()))
		}
		if _, err := w.Get(t.Context(), tenant, theirs[0].ID); !fault.Is(err, fault.NotFound) {
			t.Error("another tenant's artifact:", err)
		}
		if err := w.Remove(t.Context(), tenant, theirs[0].ID); !fault.Is(err, fault.NotFound) {
			t.Error("another tenant's artifact:", err)
		}
	})
	t.Run("S4.96 a file that is too large is told once, and stays", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("big.bin", strings.Repeat("x", 1<<20+1))
		w.put("edge.bin", strings.Repeat("y", 1<<20))
		list := w.collect("run1")
		if len(list) != 2 || list[0].Error == "" || list[0].ID != "" || list[0].Size != 1<<20+1 || list[1].Error != "" || list[1].ID == "" {
			t.Fatalf("%+v", list)
		}
		if !strings.Contains(list[0].Error, "1.0 MiB") || !strings.Contains(list[0].Error, "still in the sandbox") {
			t.Errorf("%q", list[0].Error)
		}
		if diff := cmp.Diff([]string{"big.bin"}, w.left()); diff != "" {
			t.Error(diff)
		}
		if again := w.collect("run2"); again != nil {
			t.Errorf("told again: %+v", again)
		}
		w.put("big.bin", "now it is small")
		if list = w.collect("run3"); len(list) != 1 || list[0].ID == "" {
			t.Errorf("%+v", list)
		}
	})
	t.Run("S4.97 D2 links, pipes, sockets and devices are told and never read", func(t *testing.T) {
		w := newWorld(t, defaults)
		secret := filepath.Join(w.dir, "secret")
		if err := os.WriteFile(secret, []byte("host's"), 0o600); err != nil {
			t.Fatal(err)
		}
		outside := filepath.Join(w.dir, "outside")
		if err := os.Mkdir(outside, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(outside, "f"), []byte("not in the box"), 0o644); err != nil {
			t.Fatal(err)
		}
		for to, at := range map[string]string{"/etc/passwd": "passwd", secret: "secret", outside: "dir", "../..": "up"} {
			if err := os.Symlink(to, filepath.Join(w.box.Dir, at)); err != nil {
				t.Fatal(err)
			}
		}
		if err := syscall.Mkfifo(filepath.Join(w.box.Dir, "pipe"), 0o644); err != nil {
			t.Fatal(err)
		}
		if l, err := net.Listen("unix", filepath.Join(w.box.Dir, "sock")); err != nil {
			t.Fatal(err)
		} else {
			defer l.Close()
		}
		want := []string{"dir", "passwd", "pipe", "secret", "sock", "up"}
		if syscall.Mknod(filepath.Join(w.box.Dir, "zero"), syscall.S_IFCHR|0o644, 1<<8|5) == nil { // root may
			want = append(want, "zero")
		}
		var got []string
		for _, a := range w.collect("run1") {
			got = append(got, a.Path)
			if a.ID != "" || a.Error == "" {
				t.Errorf("kept: %+v", a)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if len(w.stored()) != 0 {
			t.Error("something was read")
		}
		for _, p := range []string{secret, filepath.Join(outside, "f"), "/etc/passwd"} {
			if _, err := os.Stat(p); err != nil {
				t.Error("a link's target is gone:", err)
			}
		}
	})
	t.Run("D2 a box that is a link is not entered", func(t *testing.T) {
		w := newWorld(t, defaults)
		if err := os.Remove(w.box.Dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/etc", w.box.Dir); err != nil {
			t.Fatal(err)
		}
		list := w.collect("run1")
		if len(list) != 1 || list[0].ID != "" || !strings.Contains(list[0].Error, "not a directory") {
			t.Errorf("%+v", list)
		}
	})
	t.Run("a box that is not there holds nothing", func(t *testing.T) {
		w := newWorld(t, defaults)
		if err := os.Remove(w.box.Dir); err != nil {
			t.Fatal(err)
		}
		if list := w.collect("run1"); list != nil {
			t.Errorf("%+v", list)
		}
	})
	t.Run("names that people use arrive as they are", func(t *testing.T) {
		w := newWorld(t, defaults)
		names := []string{" leading", "a\nb", strings.Repeat("n", 255), "quote\".txt", "übersicht – 図.csv"}
		for _, name := range names {
			w.put(name, name)
		}
		var got []string
		for _, a := range w.collect("run1") {
			got = append(got, a.Name)
		}
		if diff := cmp.Diff(names, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("a name that is not UTF-8, and what lies too deep, are told and stay", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("bad\xff.txt", "x")
		w.put(strings.Repeat("d/", 40)+"f", "x")
		list := w.collect("run1")
		if len(list) != 2 || list[0].Error == "" || list[1].Error == "" {
			t.Errorf("%+v", list)
		}
		if n := len(w.left()); n != 42 {
			t.Errorf("%d left", n)
		}
	})
	t.Run("a path that is too long is told, wherever it is cut", func(t *testing.T) {
		for _, last := range []string{"", "x", "x/y"} {
			w := newWorld(t, defaults)
			long := strings.Repeat(strings.Repeat("d", 255)+"/", 4) + last + "/f"
			root, err := os.OpenRoot(w.box.Dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := root.MkdirAll(filepath.Dir(filepath.Clean(long)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := root.WriteFile(filepath.Clean(long), []byte("x"), 0o644); err != nil {
				t.Fatal(err)
			}
			root.Close()
			w.put("short", "x")
			list := w.collect("run1")
			if len(list) != 2 || list[0].Error == "" || list[1].Path != "short" || list[1].ID == "" {
				t.Errorf("%d: %+v", len(list), list)
			}
		}
	})
	t.Run("only so many files come at once, and the rest with the next run", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.box.MaxFiles = 3
		for i := range 5 {
			w.put(fmt.Sprintf("f%d", i), fmt.Sprint(i))
		}
		if list := w.collect("run1"); len(list) != 4 || list[3].Error == "" {
			t.Errorf("%+v", list)
		}
		if list := w.collect("run2"); len(list) != 2 || list[1].Error != "" {
			t.Errorf("%+v", list)
		}
	})
}

// TestAConnectionThatBreaks: what was kept before it broke is told, and not kept again.
func TestAConnectionThatBreaks(t *testing.T) {
	w := newWorld(t, defaults)
	w.put("a", "a")
	calls := 0
	broken := agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		if calls++; calls > 1 {
			return nil, fault.New(fault.Unavailable, "gone")
		}
		return w.dial(ctx)
	})
	o := artifact.Origin{Session: "s1", Run: "run1"}
	list, err := w.Collect(t.Context(), broken, tenant, o, w.box)
	if err != nil || len(list) != 1 || list[0].ID == "" {
		t.Fatalf("%+v, %v", list, err)
	}
	if left := w.left(); len(left) != 1 {
		t.Fatal("it was removed by whom?")
	}
	if again := w.collect("run2"); again != nil || w.left() != nil {
		t.Errorf("%+v is left, %+v was kept again", w.left(), again)
	}
}

func TestKeepMode(t *testing.T) {
	w := newWorld(t, defaults)
	w.box.Keep = true
	w.put("a.txt", "one")
	w.put("b/c.txt", "two")
	if list := w.collect("run1"); len(list) != 2 {
		t.Fatalf("%+v", list)
	}
	if diff := cmp.Diff([]string{"a.txt", "b/", "b/c.txt"}, w.left()); diff != "" {
		t.Error(diff)
	}
	t.Run("what did not change is not collected again", func(t *testing.T) {
		if list := w.collect("run2"); list != nil {
			t.Errorf("%+v", list)
		}
	})
	t.Run("what changed is", func(t *testing.T) {
		w.put("a.txt", "ONE")
		if list := w.collect("run3"); len(list) != 1 || w.read(list[0]) != "ONE" {
			t.Errorf("%+v", list)
		}
	})
	t.Run("also after a restart of the server", func(t *testing.T) {
		w.stop()
		w.start(defaults)
		if list := w.collect("run4"); list != nil {
			t.Errorf("%+v", list)
		}
	})
}

func TestKeep(t *testing.T) {
	w := newWorld(t, defaults)
	p := filepath.Join(w.dir, "report.pdf")
	if err := os.WriteFile(p, []byte("%PDF-1.7 …"), 0o644); err != nil {
		t.Fatal(err)
	}
	o := artifact.Origin{Session: "s1", Key: "chat-1", Sandbox: "sb1", ToolCall: "call_9"}
	a, err := w.Keeper.Keep(t.Context(), w.agent, tenant, o, p)
	if err != nil {
		t.Fatal(err)
	}
	want := artifact.Artifact{Tenant: tenant, Name: "report.pdf", Path: p, MIME: "application/pdf", Size: 12, SHA256: sum("%PDF-1.7 …"), Origin: o}
	if diff := cmp.Diff(want, a, unsteady); diff != "" {
		t.Error(diff)
	}
	if _, err := os.Stat(p); err != nil {
		t.Error("the file is gone:", err)
	}
	for what, c := range map[string]struct {
		path string
		kind fault.Kind
	}{
		"one that is not there": {filepath.Join(w.dir, "nothing"), fault.NotFound},
		"a directory":           {w.dir, fault.Invalid},
		"one that is too large": {func() string {
			big := filepath.Join(w.dir, "big")
			if err := os.WriteFile(big, make([]byte, 1<<20+1), 0o644); err != nil {
				t.Fatal(err)
			}
			return big
		}(), fault.Exhausted},
	} {
		if _, err := w.Keeper.Keep(t.Context(), w.agent, tenant, o, c.path); !fault.Is(err, c.kind) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestS4_108_EqualContentAtOnce(t *testing.T) {
	w := newWorld(t, defaults)
	const hands = 8
	boxes := make([]artifact.Box, hands)
	for i := range boxes {
		boxes[i].Dir = filepath.Join(w.dir, fmt.Sprintf("box%d", i))
		if err := os.MkdirAll(boxes[i].Dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range 20 {
			if err := os.WriteFile(filepath.Join(boxes[i].Dir, fmt.Sprint(j)), []byte(strings.Repeat(fmt.Sprint(j%5), 5000)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	var all sync.WaitGroup
	lists := make([][]artifact.Artifact, hands)
	for i := range boxes {
		all.Go(func() {
			var err error
			lists[i], err = w.Collect(t.Context(), w.agent, tenant, artifact.Origin{Session: fmt.Sprint("s", i), Run: fmt.Sprint(i)}, boxes[i])
			if err != nil {
				t.Error(err)
			}
			for _, a := range lists[i] { // a sweeper and owners that remove are about too
				if len(a.Name)%2 == 0 {
					if err := w.Remove(t.Context(), tenant, a.ID); err != nil {
						t.Error(err)
					}
				}
			}
		})
		all.Go(func() {
			if _, err := w.Sweep(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for _, list := range lists {
		for _, a := range list {
			if len(a.Name)%2 == 1 && len(w.read(a)) != 5000 {
				t.Errorf("%+v", a)
			}
		}
	}
	if n := len(w.stored()); n != 5 {
		t.Errorf("%d blobs", n)
	}
}

// TestManySmallFiles: they are told in order of path. When one cannot be stored, nothing is kept, and no
// room stays reserved.
func TestManySmallFiles(t *testing.T) {
	cfg := defaults
	cfg.MaxSessionSize = 1_500_000
	w := newWorld(t, cfg)
	var want []string
	for i := range 130 {
		name := fmt.Sprintf("%03d", i)
		content := strings.Repeat(name, 1+i%2*1000)
		if i == 64 { // larger than what one frame holds
			content = strings.Repeat(name, 100_000)
		}
		w.put(name, content)
		want = append(want, name+" "+sum(content))
	}
	tmp := filepath.Join(w.dir, "blobs", "tmp")
	if err := os.Remove(tmp); err != nil {
		t.Fatal(err)
	}
	for range 4 { // as much as there is room for, were it not given back
		if list, err := w.Collect(t.Context(), w.agent, tenant, artifact.Origin{Session: "s1", Run: "run1"}, w.box); err == nil {
			t.Fatalf("%+v", list)
		}
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	if left := w.left(); len(left) != len(want) {
		t.Errorf("%d files are left", len(left))
	}
	var got []string
	for _, a := range w.collect("run2") {
		got = append(got, a.Path+" "+sum(w.read(a)))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if left := w.left(); left != nil {
		t.Errorf("left in the box: %q", left)
	}
}

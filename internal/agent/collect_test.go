package agent_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// box makes the directory that is collected, and one beside it that must never be.
func box(t testing.TB, h *home) (in, out string) {
	t.Helper()
	in, out = filepath.Join(h.dir, "box"), filepath.Join(h.dir, "outside")
	for _, dir := range []string{in, out} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return in, out
}

func lay(t testing.TB, p, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// gather reads a whole collection.
func gather(t testing.TB, h *home, p agentapi.CollectParams) (found []agentapi.Found, content map[string]string, more bool) {
	t.Helper()
	c, err := h.Collect(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	content = map[string]string{}
	for {
		f, r, err := c.Next()
		if errors.Is(err, io.EOF) {
			return found, content, c.More()
		}
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, f)
		if r == nil {
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil {
			b = []byte("broken: " + fault.Message(err))
		}
		content[f.Path] = string(b)
	}
}

func TestCollect(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	in, _ := box(t, h)
	big := strings.Repeat("0123456789abcdef", 20_000)
	lay(t, filepath.Join(in, "a.txt"), "a")
	lay(t, filepath.Join(in, "d/big"), big)
	lay(t, filepath.Join(in, "d/e/f"), "")
	found, content, more := gather(t, h, agentapi.CollectParams{Path: in})
	if want := map[string]string{"a.txt": "a", "d/big": big, "d/e/f": ""}; !mapsEqual(content, want) || len(found) != 3 || more {
		t.Fatalf("%v, %v", found, more)
	}
	t.Run("what was seen is not told again unless it changed", func(t *testing.T) {
		lay(t, filepath.Join(in, "a.txt"), "b")
		again, content, _ := gather(t, h, agentapi.CollectParams{Path: in, Seen: marks(found)})
		if len(again) != 1 || content["a.txt"] != "b" {
			t.Errorf("%v", again)
		}
	})
	t.Run("what does not fit beside the others is told and not sent", func(t *testing.T) {
		again, content, _ := gather(t, h, agentapi.CollectParams{Path: in, MaxTotal: 100})
		if len(again) != 3 || again[1].Refused != agentapi.NoRoom || !mapsEqual(content, map[string]string{"a.txt": "b", "d/e/f": ""}) {
			t.Errorf("%v %v", again, content)
		}
	})
	t.Run("what is too large is told and not sent", func(t *testing.T) {
		again, content, _ := gather(t, h, agentapi.CollectParams{Path: in, MaxBytes: 100})
		if len(again) != 3 || again[1].Refused != agentapi.TooLarge || len(content) != 2 {
			t.Errorf("%v", again)
		}
	})
	t.Run("a file that nobody reads to its end does not hold up the next", func(t *testing.T) {
		c, err := h.Collect(t.Context(), agentapi.CollectParams{Path: in})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var names []string
		for {
			f, _, err := c.Next()
			if err != nil {
				break
			}
			names = append(names, f.Path)
		}
		if !slices.Equal(names, []string{"a.txt", "d/big", "d/e/f"}) {
			t.Error(names)
		}
	})
	t.Run("what changed since is not discarded", func(t *testing.T) {
		found, _, _ := gather(t, h, agentapi.CollectParams{Path: in})
		lay(t, filepath.Join(in, "a.txt"), "changed")
		d, err := h.Discard(t.Context(), agentapi.DiscardParams{Path: in, Files: found})
		if err != nil || d.Files != 2 {
			t.Fatal(d, err)
		}
		left, err := os.ReadDir(in)
		if err != nil || len(left) != 1 || left[0].Name() != "a.txt" {
			t.Error("directories that are empty now go, others stay:", left, err)
		}
	})
	t.Run("a directory that is not there is told", func(t *testing.T) {
		if _, err := h.Collect(t.Context(), agentapi.CollectParams{Path: filepath.Join(h.dir, "no")}); !fault.Is(err, fault.NotFound) {
			t.Error(err)
		}
	})
}

// TestCollectOfManyFiles: more than are opened at once, with what is no file and what is large among them.
func TestCollectOfManyFiles(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	in, _ := box(t, h)
	want := map[string]string{}
	var names []string
	for i := range 100 {
		name := fmt.Sprintf("%d/%03d", i/50, i)
		names = append(names, name)
		if i%40 == 7 {
			if err := errors.Join(os.MkdirAll(filepath.Join(in, filepath.Dir(name)), 0o755), os.Symlink("/etc/passwd", filepath.Join(in, name))); err != nil {
				t.Fatal(err)
			}
			continue
		}
		want[name] = strings.Repeat(name, 1+i%3*30_000)
		lay(t, filepath.Join(in, name), want[name])
	}
	found, content, more := gather(t, h, agentapi.CollectParams{Path: in})
	var got []string
	for _, f := range found {
		got = append(got, f.Path)
		if (f.Refused == "") != (want[f.Path] != "") || f.Refused == "" && f.Size != int64(len(want[f.Path])) {
			t.Errorf("%+v", f)
		}
	}
	if !slices.Equal(got, names) || !mapsEqual(content, want) || more {
		t.Errorf("%q %t", got, more)
	}
	if d, err := h.Discard(t.Context(), agentapi.DiscardParams{Path: in, Files: found}); err != nil || d.Files != len(want) {
		t.Error(d, err)
	}
}

func marks(found []agentapi.Found) (all []byte) {
	for _, f := range found {
		mark := f.Mark()
		all = append(all, mark[:]...)
	}
	return all
}

func mapsEqual(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// exchange swaps two paths at once, as no sequence of renames could.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// restless swaps pairs of paths as fast as it can until the test ends its work.
func restless(t *testing.T, pairs ...[2]string) (stop func()) {
	t.Helper()
	var over atomic.Bool
	var work sync.WaitGroup
	for _, p := range pairs {
		if err := exchange(p[0], p[1]); err != nil {
			t.Fatal(err)
		}
		work.Go(func() {
			for !over.Load() {
				_ = exchange(p[0], p[1]) // one that was removed is not swapped any more
			}
		})
	}
	return func() {
		over.Store(true)
		work.Wait()
	}
}

// TestCollectIsNotLedAstray: code that swaps directories and files for links while it is collected gets nothing out that is
// not in the box, and nothing removed.
func TestCollectIsNotLedAstray(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	in, out := box(t, h)
	const secret = "not in the box"
	lay(t, filepath.Join(in, "d/f"), "in the box")
	lay(t, filepath.Join(in, "g"), "in the box")
	lay(t, filepath.Join(out, "f"), secret)
	links := filepath.Join(h.dir, "links")
	if err := os.Mkdir(links, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"d": out, "g": filepath.Join(out, "f")} {
		if err := os.Symlink(to, filepath.Join(links, name)); err != nil {
			t.Fatal(err)
		}
	}
	stop := restless(t, [2]string{filepath.Join(in, "d"), filepath.Join(links, "d")}, [2]string{filepath.Join(in, "g"), filepath.Join(links, "g")})
	for range 300 {
		_, content, _ := gather(t, h, agentapi.CollectParams{Path: in})
		for name, c := range content {
			if c == secret {
				stop()
				t.Fatalf("%s was read from outside", name)
			}
		}
	}
	stop()
}

func TestDiscardIsNotLedAstray(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	in, out := box(t, h)
	links := filepath.Join(h.dir, "links")
	if err := os.Mkdir(links, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(out, filepath.Join(links, "d")); err != nil {
		t.Fatal(err)
	}
	// The file outside is the very same one, so only the way to it tells them apart.
	lay(t, filepath.Join(out, "f"), "x")
	if err := os.Mkdir(filepath.Join(in, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	keep := filepath.Join(in, "d", "keep") // so that the directory is not removed and the swapping goes on
	lay(t, keep, "")
	stop := restless(t, [2]string{filepath.Join(in, "d"), filepath.Join(links, "d")})
	defer stop()
	var st syscall.Stat_t
	for range 300 {
		if err := syscall.Stat(filepath.Join(out, "f"), &st); err != nil {
			t.Fatal("the file outside is gone:", err)
		}
		f := agentapi.Found{Path: "d/f", Size: st.Size, Mod: st.Mtim.Nano(), Change: st.Ctim.Nano(), Inode: st.Ino}
		for range 5 {
			if _, err := h.Discard(t.Context(), agentapi.DiscardParams{Path: in, Files: []agentapi.Found{f}}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestCollectOfAFileInMotion: an agent that waits for its reader finds a file changed when it goes on. One that grows beyond the
// limit breaks off there, one that shrinks ends there, and the collection goes on.
func TestCollectOfAFileInMotion(t *testing.T) {
	const most = 10 << 20
	for name, c := range map[string]struct {
		size  int64 // after the first bytes were read; before it was half of most
		check func(n int64, err error) bool
	}{
		"one that grows":   {4 * most, func(n int64, err error) bool { return n <= most && fault.Is(err, fault.Conflict) }},
		"one that shrinks": {0, func(n int64, err error) bool { return n < most/2 && err == nil }},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHome(t, agentapi.Boot{ID: "a"})
			in, _ := box(t, h)
			p := filepath.Join(in, "a")
			lay(t, p, "")
			lay(t, filepath.Join(in, "b"), "next")
			if err := os.Truncate(p, most/2); err != nil { // more than a socket holds
				t.Fatal(err)
			}
			files, err := h.Collect(t.Context(), agentapi.CollectParams{Path: in, MaxBytes: most})
			if err != nil {
				t.Fatal(err)
			}
			defer files.Close()
			_, r, err := files.Next()
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(p, c.size); err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, r); !c.check(n, err) {
				t.Errorf("%d bytes, %v", n, err)
			}
			if f, _, err := files.Next(); err != nil || f.Path != "b" {
				t.Error("the next one:", f, err)
			}
		})
	}
}

func FuzzDiscard(f *testing.F) {
	f.Add([]byte(`{"files":[{"path":"../outside/f"}]}`))
	f.Add([]byte(`{"files":[{"path":"/etc/passwd"},{"path":""},{"path":"."},{"path":".."},{"path":"a/../../outside/f"}]}`))
	f.Add([]byte(`{"files":[{"path":"link/f"}]}`))
	h := newHome(f, agentapi.Boot{ID: "a"})
	in, out := box(f, h)
	victim := filepath.Join(out, "f")
	lay(f, victim, "x")
	if err := os.Symlink(out, filepath.Join(in, "link")); err != nil {
		f.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(victim, &st); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p agentapi.DiscardParams
		if json.Unmarshal(raw, &p) != nil {
			return
		}
		p.Path, p.User = in, ""
		for i := range p.Files { // whatever is named has the right size and times
			p.Files[i] = agentapi.Found{Path: p.Files[i].Path, Size: st.Size, Mod: st.Mtim.Nano(), Change: st.Ctim.Nano(), Inode: st.Ino}
		}
		_, _ = h.Discard(t.Context(), p)
		if _, err := os.Stat(victim); err != nil {
			t.Fatalf("%s led outside", raw)
		}
	})
}

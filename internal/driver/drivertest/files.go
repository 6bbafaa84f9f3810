package drivertest

import (
	"bytes"
	"io"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

func (s *box) put(t *testing.T, p, content string) agentapi.Entry {
	t.Helper()
	e, err := s.Write(t.Context(), agentapi.WriteParams{Path: p}, strings.NewReader(content))
	if err != nil {
		t.Fatalf("write %s: %v", p, err)
	}
	return e
}

func (s *box) get(t *testing.T, p agentapi.ReadParams) string {
	t.Helper()
	_, r, err := s.Read(t.Context(), p)
	if err != nil {
		t.Fatalf("read %s: %v", p.Path, err)
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read %s: %v", p.Path, err)
	}
	return string(data)
}

var files = []claim{
	{"what was written is read", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		e := s.put(t, "deep/er/file.txt", "hello")
		if e.Name != "file.txt" || !strings.HasSuffix(e.Path, "/deep/er/file.txt") || e.Type != agentapi.EntryFile || e.Size != 5 || e.Mode != 0o644 {
			t.Errorf("%+v", e)
		}
		if got := s.get(t, agentapi.ReadParams{Path: "deep/er/file.txt"}); got != "hello" {
			t.Errorf("%q", got)
		}
		if got := s.exec(t, sh("cat ~/deep/er/file.txt")); got.stdout != "hello" {
			t.Errorf("commands see something else: %+v", got)
		}
	}},
	{"an empty file is a file", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "empty", "")
		if got := s.get(t, agentapi.ReadParams{Path: "empty"}); got != "" {
			t.Errorf("%q", got)
		}
	}},
	{"large files keep every byte", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		data := make([]byte, 20<<20+3)
		rand.NewChaCha8([32]byte{}).Read(data)
		if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "large"}, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		if got := s.get(t, agentapi.ReadParams{Path: "large"}); got != string(data) {
			t.Error("bytes differ")
		}
	}},
	{"a part of a file can be read", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "digits", "0123456789")
		for want, p := range map[string]agentapi.ReadParams{
			"3456": {Path: "digits", Offset: 3, Length: 4}, "789": {Path: "digits", Offset: 7}, "01": {Path: "digits", Length: 2},
			"": {Path: "digits", Offset: 100}, "89": {Path: "digits", Offset: 8, Length: 100},
		} {
			if got := s.get(t, p); got != want {
				t.Errorf("%+v: %q, want %q", p, got, want)
			}
		}
	}},
	{"an upload that breaks off leaves the old file", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "kept/file", "old")
		broken := io.MultiReader(strings.NewReader("new"), failing{})
		if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "kept/file"}, broken); err == nil {
			t.Error("no error")
		}
		if got := s.get(t, agentapi.ReadParams{Path: "kept/file"}); got != "old" {
			t.Errorf("%q", got)
		}
		eventually(t, "the draft is removed", func() bool {
			list, err := s.List(t.Context(), agentapi.ListParams{Path: "kept"})
			return err == nil && len(list) == 1
		})
	}},
	{"a rewritten file keeps its mode, and a given mode wins", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "script", Mode: 0o751}, strings.NewReader("1")); err != nil {
			t.Fatal(err)
		}
		if e := s.put(t, "script", "22"); e.Mode != 0o751 || e.Size != 2 {
			t.Errorf("%+v", e)
		}
	}},
	{"appending appends", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, part := range []string{"a", "b", "c"} {
			if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "log", Append: true}, strings.NewReader(part)); err != nil {
				t.Fatal(err)
			}
		}
		if got := s.get(t, agentapi.ReadParams{Path: "log"}); got != "abc" {
			t.Errorf("%q", got)
		}
	}},
	{"attributes of a file are kept", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		_, err := s.Write(t.Context(), agentapi.WriteParams{Path: "attr", Xattrs: map[string]string{"user.note": "héllo"}}, strings.NewReader("x"))
		if err != nil {
			if fault.Is(err, fault.Invalid) {
				t.Skip("the file system has no attributes")
			}
			t.Fatal(err)
		}
		e, err := s.Stat(t.Context(), agentapi.PathParams{Path: "attr"})
		if err != nil || e.Xattrs["user.note"] != "héllo" {
			t.Errorf("%+v, %v", e, err)
		}
		_, err = s.Write(t.Context(), agentapi.WriteParams{Path: "attr", Xattrs: map[string]string{"trusted.x": "y"}}, strings.NewReader("x"))
		expectKind(t, err, fault.Invalid)
	}},
	{"writing through a link writes what it leads to", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "links/real", "1")
		s.exec(t, sh("cd ~/links && ln -sf real way"))
		s.put(t, "links/way", "2")
		if got := s.get(t, agentapi.ReadParams{Path: "links/real"}); got != "2" {
			t.Errorf("%q", got)
		}
		e, err := s.Stat(t.Context(), agentapi.PathParams{Path: "links/way"})
		if err != nil || e.Type != agentapi.EntrySymlink || e.Target != "real" {
			t.Errorf("%+v, %v", e, err)
		}
	}},
	{"what is not there is not found", needsNothing, func(t *testing.T, b *bench) {
		s, ctx := b.shared(t), t.Context()
		_, err := s.Stat(ctx, agentapi.PathParams{Path: "nothing"})
		expectKind(t, err, fault.NotFound)
		_, _, err = s.Read(ctx, agentapi.ReadParams{Path: "nothing"})
		expectKind(t, err, fault.NotFound)
		_, err = s.List(ctx, agentapi.ListParams{Path: "nothing"})
		expectKind(t, err, fault.NotFound)
		expectKind(t, s.Remove(ctx, agentapi.RemoveParams{Path: "nothing"}), fault.NotFound)
		_, err = s.Move(ctx, agentapi.MoveParams{From: "nothing", To: "something"})
		expectKind(t, err, fault.NotFound)
		_, err = s.Chmod(ctx, agentapi.ChmodParams{Path: "nothing", Mode: new(uint32)})
		expectKind(t, err, fault.NotFound)
		_, err = s.Watch(ctx, agentapi.WatchParams{Path: "nothing"})
		expectKind(t, err, fault.NotFound)
	}},
	{"what is not a file is not read, and never waited for", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.exec(t, sh("mkdir -p ~/odd && cd ~/odd && mkfifo pipe"))
		for _, p := range []string{"odd", "odd/pipe", "/dev/zero", ""} {
			_, _, err := s.Read(t.Context(), agentapi.ReadParams{Path: p})
			expectKind(t, err, fault.Invalid)
		}
		for _, p := range []string{"odd", "odd/pipe"} {
			_, err := s.Write(t.Context(), agentapi.WriteParams{Path: p}, strings.NewReader("x"))
			expectKind(t, err, fault.Invalid)
		}
	}},
	{"processes are not read as files", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, p := range []string{"/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/self/root/etc/passwd", "/proc/thread-self/maps"} {
			_, _, err := s.Read(t.Context(), agentapi.ReadParams{Path: p})
			expectKind(t, err, fault.Denied, fault.Invalid)
		}
		if got := s.get(t, agentapi.ReadParams{Path: "/proc/meminfo"}); !strings.Contains(got, "MemTotal") {
			t.Errorf("%q", got)
		}
	}},
	{"the user's rights are the file operations' rights", needsIsolation, func(t *testing.T, b *bench) {
		s := b.shared(t)
		_, err := s.Write(t.Context(), agentapi.WriteParams{Path: "/etc/cove-claim"}, strings.NewReader("x"))
		expectKind(t, err, fault.Denied)
		expectKind(t, s.Remove(t.Context(), agentapi.RemoveParams{Path: "/etc/passwd"}), fault.Denied)
		_, err = s.Mkdir(t.Context(), agentapi.MkdirParams{Path: "/etc/cove-claim"})
		expectKind(t, err, fault.Denied)
	}},
	{"a directory is listed in order and as deep as asked", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		for _, p := range []string{"list/b", "list/a/x", "list/a/y/z", "list/c"} {
			s.put(t, p, "1")
		}
		for depth, want := range map[int][]string{
			0: {"a", "b", "c"}, 1: {"a", "b", "c"}, 2: {"a", "a/x", "a/y", "b", "c"}, 3: {"a", "a/x", "a/y", "a/y/z", "b", "c"},
		} {
			entries, err := s.List(t.Context(), agentapi.ListParams{Path: "list", Depth: depth})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range entries {
				_, rest, _ := strings.Cut(e.Path, "/list/")
				got = append(got, rest)
			}
			if !slices.Equal(got, want) {
				t.Errorf("depth %d: %q, want %q", depth, got, want)
			}
		}
		_, err := s.List(t.Context(), agentapi.ListParams{Path: "list/b"})
		expectKind(t, err, fault.Invalid)
	}},
	{"directories are made, once or with parents", needsNothing, func(t *testing.T, b *bench) {
		s, ctx := b.shared(t), t.Context()
		e, err := s.Mkdir(ctx, agentapi.MkdirParams{Path: "made", Mode: 0o700})
		if err != nil || e.Type != agentapi.EntryDir || e.Mode != 0o700 {
			t.Errorf("%+v, %v", e, err)
		}
		_, err = s.Mkdir(ctx, agentapi.MkdirParams{Path: "made"})
		expectKind(t, err, fault.Conflict)
		_, err = s.Mkdir(ctx, agentapi.MkdirParams{Path: "made/x/y"})
		expectKind(t, err, fault.NotFound)
		for range 2 {
			if _, err := s.Mkdir(ctx, agentapi.MkdirParams{Path: "made/x/y", Parents: true}); err != nil {
				t.Error(err)
			}
		}
	}},
	{"a move moves, with parents, also between file systems", needsNothing, func(t *testing.T, b *bench) {
		s, ctx := b.shared(t), t.Context()
		s.put(t, "from/file", "1")
		s.put(t, "from/sub/file", "2")
		s.exec(t, sh("ln -s file ~/from/link; chmod 700 ~/from/sub"))
		e, err := s.Move(ctx, agentapi.MoveParams{From: "from", To: "new/place"})
		if err != nil || !strings.HasSuffix(e.Path, "/new/place") {
			t.Fatalf("%+v, %v", e, err)
		}
		other := path.Join("/dev/shm", "cove-"+strings.TrimPrefix(s.id, "sb-"))
		if _, err := s.Move(ctx, agentapi.MoveParams{From: "new/place", To: other}); err != nil {
			t.Fatal(err)
		}
		defer s.Remove(ctx, agentapi.RemoveParams{Path: other, Recursive: true})
		entries, err := s.List(ctx, agentapi.ListParams{Path: other, Depth: 2})
		if err != nil || len(entries) != 4 || entries[1].Target != "file" || entries[2].Mode != 0o700 {
			t.Fatalf("%+v, %v", entries, err)
		}
		if got := s.get(t, agentapi.ReadParams{Path: other + "/sub/file"}); got != "2" {
			t.Errorf("%q", got)
		}
		_, err = s.Stat(ctx, agentapi.PathParams{Path: "new/place"})
		expectKind(t, err, fault.NotFound)
	}},
	{"a directory with content goes only when asked", needsNothing, func(t *testing.T, b *bench) {
		s, ctx := b.shared(t), t.Context()
		s.put(t, "full/a/b", "1")
		s.exec(t, sh("ln -s / ~/full/root"))
		expectKind(t, s.Remove(ctx, agentapi.RemoveParams{Path: "full"}), fault.Conflict)
		if err := s.Remove(ctx, agentapi.RemoveParams{Path: "full", Recursive: true}); err != nil {
			t.Error(err)
		}
		_, err := s.Stat(ctx, agentapi.PathParams{Path: "full"})
		expectKind(t, err, fault.NotFound)
		expectKind(t, s.Remove(ctx, agentapi.RemoveParams{Path: "/"}), fault.Invalid)
	}},
	{"permissions change", needsNothing, func(t *testing.T, b *bench) {
		s := b.shared(t)
		s.put(t, "perm", "1")
		mode := uint32(0o4711)
		e, err := s.Chmod(t.Context(), agentapi.ChmodParams{Path: "perm", Mode: &mode})
		if err != nil || e.Mode != mode {
			t.Errorf("%+v, %v", e, err)
		}
		s.exec(t, sh("ln -s perm ~/to-perm"))
		other := uint32(0o777)
		if e, err = s.Chmod(t.Context(), agentapi.ChmodParams{Path: "to-perm", Mode: &other, NoFollow: true}); err != nil || e.Type != agentapi.EntrySymlink {
			t.Errorf("of a link itself: %+v, %v", e, err)
		}
		if e, err = s.Stat(t.Context(), agentapi.PathParams{Path: "perm"}); err != nil || e.Mode != mode {
			t.Errorf("behind a link that is not followed: %+v, %v", e, err)
		}
		_, err = s.Chmod(t.Context(), agentapi.ChmodParams{Path: "perm", Owner: "no-such-user"})
		expectKind(t, err, fault.NotFound)
	}},
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrNoProgress }

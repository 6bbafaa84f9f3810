package envd_test

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
)

// me is who owns what this process makes.
func me(t testing.TB) (name, group string) {
	t.Helper()
	u, err := user.Current()
	if err != nil {
		t.Skip("no name: ", err)
	}
	g, err := user.LookupGroupId(u.Gid)
	if err != nil {
		t.Skip("no group: ", err)
	}
	return u.Username, g.Name
}

func put(t testing.TB, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestEntries(t *testing.T) {
	w := newWorld(t)
	name, group := me(t)
	file := put(t, w.home+"/d/file.txt", "hello")
	for link, to := range map[string]string{"d/link": "file.txt", "d/up": "..", "d/dangling": "nowhere", "d/second": "link", "d/topipe": "pipe"} {
		if err := os.Symlink(to, filepath.Join(w.home, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(w.home+"/d/pipe", 0o644); err != nil {
		t.Fatal(err)
	}
	entry := func(name_ string, kind pb.FileType, size int64, mode uint32, perms string, link *string) *pb.EntryInfo {
		return &pb.EntryInfo{Name: name_, Type: kind, Path: filepath.Join(w.home, "d", name_), Size: size, Mode: mode, Permissions: perms,
			Owner: name, Group: group, SymlinkTarget: link, IsSymlink: link != nil}
	}
	want := []*pb.EntryInfo{
		entry("dangling", pb.FileType_FILE_TYPE_SYMLINK, 7, 0, "Lrwxrwxrwx", proto.String(w.home+"/d/dangling")),
		entry("file.txt", pb.FileType_FILE_TYPE_FILE, 5, 0o644, "-rw-r--r--", nil),
		entry("link", pb.FileType_FILE_TYPE_FILE, 8, 0o644, "Lrwxrwxrwx", &file),
		entry("pipe", pb.FileType_FILE_TYPE_UNSPECIFIED, 0, 0o644, "prw-r--r--", nil),
		entry("second", pb.FileType_FILE_TYPE_FILE, 4, 0o644, "Lrwxrwxrwx", &file),
		entry("topipe", pb.FileType_FILE_TYPE_SYMLINK, 4, 0o644, "Lrwxrwxrwx", proto.String(w.home+"/d/pipe")),
		entry("up", pb.FileType_FILE_TYPE_DIRECTORY, 2, 0o755, "Lrwxrwxrwx", &w.home),
	}
	ignore := protocmp.IgnoreFields(&pb.EntryInfo{}, "modified_time")
	for codec, opts := range codecs {
		c := w.files(opts...)
		list, err := c.ListDir(t.Context(), connect.NewRequest(&pb.ListDirRequest{Path: "d"}))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, list.Msg.GetEntries(), protocmp.Transform(), ignore); diff != "" {
			t.Errorf("%s list: %s", codec, diff)
		}
		for _, e := range want {
			got, err := c.Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: e.GetPath()}))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(e, got.Msg.GetEntry(), protocmp.Transform(), ignore); diff != "" {
				t.Errorf("%s stat: %s", codec, diff)
			}
			if got.Msg.GetEntry().GetModifiedTime().AsTime().Year() < 2020 {
				t.Error("no modified time")
			}
		}
	}
}

func TestPaths(t *testing.T) {
	w := newWorld(t)
	put(t, w.home+"/a/b", "x")
	for given, want := range map[string]string{
		"": w.home, "~": w.home, "~/a": w.home + "/a", "a/b": w.home + "/a/b", "./a/../a": w.home + "/a", "/": "/", w.home + "/a/": w.home + "/a",
	} {
		got, err := w.files().Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: given}))
		if err != nil || got.Msg.GetEntry().GetPath() != want {
			t.Errorf("%q is %v, %v; want %q", given, got, err, want)
		}
	}
	if _, err := w.files().Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: "~other/x"})); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("somebody else's home: %v", err)
	}
}

func TestListDepth(t *testing.T) {
	w := newWorld(t)
	put(t, w.home+"/t/a/b/c", "")
	put(t, w.home+"/t/z", "")
	for depth, want := range map[uint32]string{0: "a z", 1: "a z", 2: "a a/b z", 3: "a a/b a/b/c z", 1 << 31: "a a/b a/b/c z"} {
		list, err := w.files().ListDir(t.Context(), connect.NewRequest(&pb.ListDirRequest{Path: w.home + "/t", Depth: depth}))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range list.Msg.GetEntries() {
			got = append(got, strings.TrimPrefix(e.GetPath(), w.home+"/t/"))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("depth %d: %v, want %s", depth, got, want)
		}
	}
}

func TestFilesystemCodes(t *testing.T) {
	w := newWorld(t)
	c := w.files(connect.WithProtoJSON())
	put(t, w.home+"/file", "x")
	put(t, w.home+"/dir/inner", "x")
	if err := os.Symlink("loop", w.home+"/loop"); err != nil {
		t.Fatal(err)
	}
	stat := func(p string) error {
		_, err := c.Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: p}))
		return err
	}
	list := func(p string) error {
		_, err := c.ListDir(t.Context(), connect.NewRequest(&pb.ListDirRequest{Path: p}))
		return err
	}
	mkdir := func(p string) error {
		_, err := c.MakeDir(t.Context(), connect.NewRequest(&pb.MakeDirRequest{Path: p}))
		return err
	}
	move := func(from, to string) error {
		_, err := c.Move(t.Context(), connect.NewRequest(&pb.MoveRequest{Source: from, Destination: to}))
		return err
	}
	remove := func(p string) error {
		_, err := c.Remove(t.Context(), connect.NewRequest(&pb.RemoveRequest{Path: p}))
		return err
	}
	watch := func(p string) error {
		s, err := c.WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{Path: p}))
		if err != nil {
			return err
		}
		defer s.Close()
		if s.Receive() && s.Msg().GetStart() != nil {
			return nil
		}
		return s.Err()
	}
	poll := func(p string) error {
		_, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: p}))
		return err
	}
	const fine = connect.Code(0)
	for _, step := range []struct {
		claim string
		err   error
		want  connect.Code
	}{
		{"stat of nothing", stat("none"), connect.CodeNotFound},
		{"a list of nothing", list("none"), connect.CodeNotFound},
		{"a list of a file", list("file"), connect.CodeInvalidArgument},
		{"a list of a loop", list("loop"), connect.CodeFailedPrecondition},
		{"a new directory with parents", mkdir("p/q/r"), fine},
		{"it exists", mkdir("p/q/r"), connect.CodeAlreadyExists},
		{"a directory where a file is", mkdir("file"), connect.CodeInvalidArgument},
		{"a move with parents", move("file", "x/y/moved"), fine},
		{"a move of nothing", move("file", "elsewhere"), connect.CodeNotFound},
		{"a move over a file", move("x/y/moved", "dir/inner"), fine},
		{"removal of a tree", remove("dir"), fine},
		{"removal of nothing", remove("dir"), fine},
		{"removal of everything", remove("/"), connect.CodeInvalidArgument},
		{"a watch of nothing", watch("none"), connect.CodeNotFound},
		{"a watch of a file", watch(put(t, w.home+"/f", "")), connect.CodeInvalidArgument},
		{"a watch of a loop", watch("loop"), connect.CodeFailedPrecondition},
		{"a watch", watch(w.home), fine},
		{"a watcher of nothing", poll("none"), connect.CodeNotFound},
		{"a watcher of a file", poll("f"), connect.CodeInvalidArgument},
		{"a name that is too long", stat(strings.Repeat("n", 300)), connect.CodeInvalidArgument},
		{"a NUL in a name", stat("a\x00b"), connect.CodeInvalidArgument},
	} {
		if got := connect.CodeOf(step.err); step.err == nil && step.want != fine || step.err != nil && got != step.want {
			t.Errorf("%s: %v, want %v", step.claim, step.err, step.want)
		}
	}
}

func TestWatcherTellsEverythingAtOnce(t *testing.T) {
	w := newWorld(t)
	c := w.files(connect.WithProtoJSON())
	for range 20 { // what is asked right after an upload must hold it, however the goroutines run
		dir := t.TempDir()
		made, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: dir}))
		if err != nil {
			t.Fatal(err)
		}
		upload(t, w, dir+"/new.txt", "content")
		if got, want := polled(t, w, made.Msg.GetWatcherId()), "CREATE new.txt, CHMOD new.txt, WRITE new.txt"; got != want {
			t.Fatalf("told %s, want %s", got, want)
		}
		if got := polled(t, w, made.Msg.GetWatcherId()); got != "" {
			t.Fatalf("told again: %s", got)
		}
		upload(t, w, dir+"/new.txt", "more")
		if got, want := polled(t, w, made.Msg.GetWatcherId()), "CHMOD new.txt, WRITE new.txt"; !strings.HasPrefix(got, want) {
			t.Fatalf("an overwrite told %s, want %s", got, want)
		}
		gone := connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: made.Msg.GetWatcherId()})
		if _, err := c.RemoveWatcher(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
		if _, err := c.RemoveWatcher(t.Context(), gone); connect.CodeOf(err) != connect.CodeNotFound {
			t.Fatalf("removed twice: %v", err)
		}
	}
}

func polled(t testing.TB, w *world, id string) string {
	t.Helper()
	got, err := w.files().GetWatcherEvents(t.Context(), connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: id}))
	if err != nil {
		t.Fatal(err)
	}
	return spell(got.Msg.GetEvents())
}

func spell(events []*pb.FilesystemEvent) string {
	var words []string
	for _, e := range events {
		words = append(words, strings.TrimPrefix(e.GetType().String(), "EVENT_TYPE_")+" "+e.GetName())
	}
	return strings.Join(words, ", ")
}

func TestRecursiveWatcherSeesNewDirectories(t *testing.T) {
	w := newWorld(t)
	c := w.files()
	for range 20 {
		dir := t.TempDir()
		made, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: dir, Recursive: true}))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.MakeDir(t.Context(), connect.NewRequest(&pb.MakeDirRequest{Path: dir + "/sub"})); err != nil {
			t.Fatal(err)
		}
		upload(t, w, dir+"/sub/f", "content")
		got := strings.Split(polled(t, w, made.Msg.GetWatcherId()), ", ")
		for _, want := range []string{"CREATE sub", "CREATE sub/f", "WRITE sub/f"} {
			if !slices.Contains(got, want) {
				t.Fatalf("told %v, without %s", got, want)
			}
		}
		if n := len(slices.DeleteFunc(slices.Clone(got), func(s string) bool { return s != "CREATE sub/f" })); n != 1 {
			t.Fatalf("told %d times of one file: %v", n, got)
		}
	}
}

func TestWatchTells(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	stream, err := w.files(connect.WithProtoJSON()).WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{Path: dir, IncludeEntry: true}))
	if err != nil || !stream.Receive() || stream.Msg().GetStart() == nil {
		t.Fatal(err, stream.Err())
	}
	put(t, dir+"/a", "x")
	if err := os.Rename(dir+"/a", dir+"/b"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir + "/b"); err != nil {
		t.Fatal(err)
	}
	put(t, dir+"/last", "")
	var events []*pb.FilesystemEvent
	for stream.Receive() {
		e := stream.Msg().GetFilesystem()
		events = append(events, e)
		if e.GetName() == "last" {
			break
		}
	}
	if got, want := spell(events), "CREATE a, WRITE a, RENAME a, CREATE b, REMOVE b, CREATE last"; got != want {
		t.Errorf("told %s, want %s", got, want)
	}
	if last := events[len(events)-1].GetEntry(); last.GetPath() != dir+"/last" || last.GetType() != pb.FileType_FILE_TYPE_FILE {
		t.Errorf("entry %v", last)
	}
}

func TestWatchersAreBounded(t *testing.T) {
	w := newWorld(t)
	var err error
	for n := 0; err == nil && n < 100; n++ {
		_, err = w.files().CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: w.home}))
	}
	if connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("got %v", fmt.Sprint(err))
	}
}

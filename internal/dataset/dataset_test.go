package dataset_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
)

const (
	acme = "acme"
	one  = "ses_one"
	two  = "ses_two"
)

// world is a Store on a real database and a real directory.
type world struct {
	*dataset.Store
	t     *testing.T
	dir   string
	cfg   dataset.Config
	close func()
	heard heard
}

type heard struct {
	mu  sync.Mutex
	all []string
}

func (h *heard) DatasetStaged(_ int64, deduplicated bool) {
	if deduplicated {
		h.add("again")
	} else {
		h.add("staged")
	}
}

func (h *heard) DatasetRejected(reason string) { h.add(reason) }

func (h *heard) add(word string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, word)
}

func newWorld(t *testing.T, cfg dataset.Config) *world {
	w := &world{t: t, dir: t.TempDir(), cfg: cfg}
	w.open()
	t.Cleanup(func() { w.close() })
	for _, session := range []string{one, two} {
		w.mount(acme, session)
	}
	return w
}

func (w *world) open() {
	w.t.Helper()
	index, err := sqlstore.Open(filepath.Join(w.dir, "cove.db"))
	if err != nil {
		w.t.Fatal(err)
	}
	shelf, err := local.OpenShelf(filepath.Join(w.dir, "datasets"), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Store = dataset.New(w.cfg, index, shelf, &w.heard, slog.New(slog.DiscardHandler))
	if err := w.Open(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	w.close = func() {
		if err := errors.Join(w.Store.Close(), shelf.Close(), index.Close()); err != nil {
			w.t.Error(err)
		}
	}
}

func (w *world) restart() {
	w.t.Helper()
	w.close()
	w.open()
}

func (w *world) mount(tenant, session string) {
	w.t.Helper()
	m, err := w.Mount(w.t.Context(), tenant, session)
	if want := (sandbox.Mount{Kind: sandbox.MountData, Source: session, Target: "/datasets", ReadOnly: true}); err != nil || m != want {
		w.t.Fatalf("mount: %+v %v", m, err)
	}
}

func none(context.Context) (*agentapi.Client, error) {
	return nil, fault.New(fault.Gone, "the session has no sandbox")
}

func (w *world) stage(session, id, content string) dataset.Dataset {
	w.t.Helper()
	d, err := w.Stage(w.t.Context(), acme, session, dataset.Upload{ID: id, Size: -1, Body: strings.NewReader(content)}, none)
	if err != nil {
		w.t.Fatal(err)
	}
	return d
}

func (w *world) list(session string) []dataset.Dataset {
	w.t.Helper()
	all, err := w.List(w.t.Context(), acme, session)
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

// says compares what is known of a session's datasets, but for when.
func (w *world) says(claim, session string, want ...dataset.Dataset) {
	w.t.Helper()
	for i := range want {
		want[i].Tenant, want[i].Session = acme, session
	}
	if diff := cmp.Diff(want, w.list(session), cmpopts.IgnoreFields(dataset.Dataset{}, "Updated")); diff != "" {
		w.t.Errorf("%s: %s", claim, diff)
	}
}

func (w *world) file(session, name string) string {
	return filepath.Join(w.dir, "datasets/sessions", session, name)
}

// files are all regular files below the store's directory that are not links of a session, by kind.
func (w *world) files(part string) (names []string) {
	w.t.Helper()
	err := filepath.WalkDir(filepath.Join(w.dir, "datasets", part), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			names = append(names, filepath.Base(path))
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return names
}

func (w *world) blobs() []string { return w.files("blobs") }

// eventually waits for what another goroutine does.
func (w *world) eventually(claim string, true func() bool) {
	w.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !true(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("not in two minutes: %s", claim)
		}
	}
}

func digest(content string) string {
	sum := sha256.Sum256([]byte(content))
	return hex.EncodeToString(sum[:])
}

func loaded(id, content string) dataset.Dataset {
	return dataset.Dataset{ID: id, File: id + ".parquet", Status: dataset.Loaded, Path: "/datasets/" + id + ".parquet", Size: int64(len(content)), SHA256: digest(content)}
}

func wantKind(t *testing.T, claim string, err error, kind fault.Kind, words string) {
	t.Helper()
	if !fault.Is(err, kind) || !strings.Contains(fault.Message(err), words) {
		t.Errorf("%s: got %v", claim, err)
	}
}

func TestS4_69_DatasetIsPendingThenLoadedAndStaysSo(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	body, send := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "sales", Size: -1, Body: body}, none)
		done <- err
	}()
	_, _ = send.Write([]byte("some "))
	w.says("while it arrives", one, dataset.Dataset{ID: "sales", File: "sales.parquet", Status: dataset.Staging})
	if names := w.files("sessions"); len(names) != 0 {
		t.Errorf("half of it is seen: %q", names)
	}
	_, _ = send.Write([]byte("rows"))
	send.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.says("when it is there", one, loaded("sales", "some rows"))
	w.restart()
	w.says("after a restart", one, loaded("sales", "some rows"))
	text, err := os.ReadFile(w.file(one, "sales.parquet"))
	if err != nil || string(text) != "some rows" {
		t.Errorf("%q %v", text, err)
	}
	if info, err := os.Stat(w.file(one, "sales.parquet")); err != nil || info.Mode() != 0o444 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	seen, err := w.Seen(t.Context(), acme, one)
	if diff := cmp.Diff([]artifact.Dataset{{ID: "sales", SHA256: digest("some rows")}}, seen); diff != "" || err != nil {
		t.Errorf("a run sees %s %v", diff, err)
	}
}

func TestS4_70_WhatIsLoadedIsNotFetchedAgain(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	first := w.stage(one, "sales", "rows")
	d, err := w.Mark(t.Context(), acme, one, dataset.Mark{ID: "sales", Status: dataset.Pending}, none)
	if err != nil || d.Status != dataset.Loaded || d.SHA256 != first.SHA256 {
		t.Errorf("who is about to fetch it hears %+v %v", d, err)
	}
	d, err = w.Mark(t.Context(), acme, two, dataset.Mark{ID: "theirs", File: "x.csv", Status: dataset.Loaded, SHA256: first.SHA256}, none)
	if err != nil {
		t.Fatal(err)
	}
	w.says("another session has it by its digest", two, dataset.Dataset{ID: "theirs", File: "x.csv", Status: dataset.Loaded, Path: "/datasets/x.csv", Size: 4, SHA256: first.SHA256})
	a, errA := os.Stat(w.file(one, "sales.parquet"))
	b, errB := os.Stat(w.file(two, "x.csv"))
	if errA != nil || errB != nil || !os.SameFile(a, b) || a.Sys().(*syscall.Stat_t).Nlink != 3 {
		t.Errorf("two sessions do not share one file: %v %v", errA, errB)
	}
	_, err = w.Mark(t.Context(), acme, two, dataset.Mark{ID: "more", Status: dataset.Loaded, SHA256: digest("never sent")}, none)
	wantKind(t, "content that is not here", err, fault.NotFound, "send it")
	_, err = w.Mark(t.Context(), "umbrella", "ses_umbrella", dataset.Mark{ID: "more", Status: dataset.Loaded, SHA256: first.SHA256}, none)
	wantKind(t, "another tenant's content", err, fault.NotFound, "send it")
	if diff := cmp.Diff([]string{"staged", "again"}, w.heard.all); diff != "" {
		t.Error(diff)
	}
}

func TestS4_71_FailedCanBeTriedAgain(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	for _, status := range []dataset.Status{dataset.Pending, dataset.Failed} {
		if _, err := w.Mark(t.Context(), acme, one, dataset.Mark{ID: "sales", Status: status, Error: "503 from the warehouse"}, none); err != nil {
			t.Fatal(err)
		}
		w.says("what is marked", one, dataset.Dataset{ID: "sales", File: "sales.parquet", Status: status, Error: "503 from the warehouse"})
	}
	_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "sales", Body: io.MultiReader(strings.NewReader("ro"), broken{})}, none)
	wantKind(t, "an upload that breaks off", err, fault.Invalid, "broke off")
	if all := w.list(one); len(all) != 1 || all[0].Status != dataset.Failed || !strings.Contains(all[0].Error, "broke off") {
		t.Errorf("%+v", all)
	}
	if left := w.files("."); len(left) != 0 {
		t.Errorf("it leaves %q", left)
	}
	w.stage(one, "sales", "rows")
	w.says("after another try", one, loaded("sales", "rows"))
	_, err = w.Stage(t.Context(), acme, one, dataset.Upload{ID: "sales", Body: broken{}}, none)
	wantKind(t, "a second upload that breaks off", err, fault.Invalid, "broke off")
	w.says("what was loaded stays", one, loaded("sales", "rows"))
	if diff := cmp.Diff([]string{"invalid", "staged", "invalid"}, w.heard.all); diff != "" {
		t.Error(diff)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestAnUploadEndsWithItsSender(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := w.Stage(ctx, acme, one, dataset.Upload{ID: "sales", Body: leaving{cancel}}, none)
	wantKind(t, "a sender who leaves", err, fault.Invalid, "left")
	if all := w.list(one); len(all) != 1 || all[0].Status != dataset.Failed {
		t.Errorf("%+v", all)
	}
}

func TestWhatHasArrivedIsLoadedWhoeverLeaves(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	body := io.MultiReader(strings.NewReader("rows"), hook(func() (int, error) { cancel(); return 0, io.EOF }))
	if _, err := w.Stage(ctx, acme, one, dataset.Upload{ID: "sales", Body: body}, none); err != nil {
		t.Error(err)
	}
	w.says("when its sender has left", one, loaded("sales", "rows"))
}

type hook func() (int, error)

func (h hook) Read([]byte) (int, error) { return h() }

type leaving struct{ cancel func() }

func (l leaving) Read([]byte) (int, error) { l.cancel(); return 0, io.ErrUnexpectedEOF }

func TestS4_52_D3_NamesLeadNowhere(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	for _, id := range []string{"", "../x", "a/b", "/etc/passwd", ".", "..", ".hidden", "-x", "a b", "a\x00", "ä", "a;rm -rf /", strings.Repeat("a", 129)} {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: id, Body: strings.NewReader("x")}, none)
		wantKind(t, "id "+id, err, fault.Invalid, "letters, digits")
		_, err = w.Mark(t.Context(), acme, one, dataset.Mark{ID: id, Status: dataset.Pending}, none)
		wantKind(t, "id "+id, err, fault.Invalid, "letters, digits")
		wantKind(t, "id "+id, w.Remove(t.Context(), acme, one, id, none), fault.Invalid, "letters, digits")
		if id == "" {
			continue
		}
		_, err = w.Stage(t.Context(), acme, one, dataset.Upload{ID: "ok", File: id, Body: strings.NewReader("x")}, none)
		wantKind(t, "file "+id, err, fault.Invalid, "letters, digits")
	}
	for id, file := range map[string]string{"a": "a.parquet", "a.csv": "a.csv", "2024-01:x@y=z+1": "2024-01:x@y=z+1.parquet", strings.Repeat("a", 100): strings.Repeat("a", 100) + ".parquet"} {
		if d := w.stage(one, id, id); d.File != file || d.Path != "/datasets/"+file {
			t.Errorf("%s: %+v", id, d)
		}
	}
	for _, session := range []string{"../x", "", "a/b", "."} {
		if _, err := w.Mount(t.Context(), acme, session); !fault.Is(err, fault.Invalid) {
			t.Errorf("session %q: %v", session, err)
		}
	}
}

func TestOneFileNameIsOneDatasets(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "sales", "rows")
	_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "other", File: "sales.parquet", Body: strings.NewReader("theirs")}, none)
	wantKind(t, "the file of another", err, fault.Conflict, "another file")
	w.says("nothing has changed", one, loaded("sales", "rows"))
	d, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "sales", File: "new.csv", Body: strings.NewReader("rows")}, none)
	if err != nil || d.File != "new.csv" {
		t.Errorf("%+v %v", d, err)
	}
	if _, err := os.Stat(w.file(one, "sales.parquet")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its old name: %v", err)
	}
}

func TestStagesOfOneIDAreOneAfterTheOther(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			content := strings.Repeat(string(rune('a'+i)), 100_000)
			if _, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "same", Body: strings.NewReader(content)}, none); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	text, err := os.ReadFile(w.file(one, "same.parquet"))
	if err != nil || len(text) != 100_000 || strings.Trim(string(text), string(text[:1])) != "" {
		t.Fatalf("content is mixed: %d bytes, %v", len(text), err)
	}
	w.says("the last one counts", one, loaded("same", string(text)))
	if left := w.blobs(); !slices.Equal(left, []string{digest(string(text))}) {
		t.Errorf("what it replaced is there still: %q", left)
	}
}

func TestBounds(t *testing.T) {
	w := newWorld(t, dataset.Config{MaxSize: 10, MaxTenantSize: diskspace.Charge(15, 2)})
	for _, size := range []int64{-1, 11} {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "big", Size: size, Body: strings.NewReader("eleven byte")}, none)
		wantKind(t, "one that is too large", err, fault.Invalid, "datasets.max_size")
	}
	w.stage(one, "ten", "ten bytes!")
	w.stage(two, "again", "ten bytes!") // counts once
	_, err := w.Stage(t.Context(), acme, two, dataset.Upload{ID: "more", Body: strings.NewReader("six by")}, none)
	wantKind(t, "more than a tenant may have", err, fault.Exhausted, "datasets.max_tenant_size")
	w.stage(two, "five", "five ")
	if got := len(w.blobs()); got != 2 {
		t.Errorf("%d blobs", got)
	}
	if diff := cmp.Diff([]string{"too_large", "too_large", "staged", "again", "tenant_quota", "staged"}, w.heard.all); diff != "" {
		t.Error(diff)
	}
}

// TestBounds_ManySmall: datasets of one byte use up the quota by their number.
func TestBounds_ManySmall(t *testing.T) {
	const files = 10
	w := newWorld(t, dataset.Config{MaxTenantSize: diskspace.Charge(files+1, files)})
	for i := range files {
		w.stage(one, fmt.Sprint("d", i), fmt.Sprint(i))
	}
	more := func() error {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "more", Body: strings.NewReader("m")}, none)
		return err
	}
	wantKind(t, "one more", more(), fault.Exhausted, "datasets.max_tenant_size")
	if err := w.Remove(t.Context(), acme, one, "d0", none); err != nil {
		t.Fatal(err)
	}
	if err := more(); err != nil {
		t.Errorf("in the place of one that is removed: %v", err)
	}
	wantKind(t, "one more than that", func() error {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "again", Body: strings.NewReader("a")}, none)
		return err
	}(), fault.Exhausted, "datasets.max_tenant_size")
}

// TestLingering_Empty: an empty dataset that a process has open takes an inode.
func TestLingering_Empty(t *testing.T) {
	w := newWorld(t, dataset.Config{MaxTenantSize: diskspace.Charge(1, 1)})
	w.stage(one, "a", "")
	f, err := os.Open(w.file(one, "a.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := w.Remove(t.Context(), acme, one, "a", none); err != nil {
		t.Fatal(err)
	}
	_, err = w.Stage(t.Context(), acme, one, dataset.Upload{ID: "b", Body: strings.NewReader("b")}, none)
	wantKind(t, "another beside it", err, fault.Exhausted, "datasets.max_tenant_size")
}

func TestATenantSendsSoManyAtOnce(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	body, send := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	w.eventually("no more may come", func() bool {
		// The first arrives, the others wait for their turn.
		all.Go(func() { _, _ = w.Stage(ctx, acme, one, dataset.Upload{ID: "same", Body: body}, none) })
		_, err := w.Stage(ctx, acme, two, dataset.Upload{ID: "other", Body: strings.NewReader("x")}, none)
		return fault.Is(err, fault.Exhausted) && strings.Contains(fault.Message(err), "wait")
	})
	cancel()
	send.CloseWithError(io.ErrUnexpectedEOF)
	all.Wait()
	w.stage(two, "other", "x")
}

func TestWhatArrivesCountsFromItsFirstByte(t *testing.T) {
	w := newWorld(t, dataset.Config{MaxSize: 600, MaxTenantSize: diskspace.Charge(1000, 2)})
	w.stage(one, "old", strings.Repeat("o", 500))
	w.stage(one, "older", strings.Repeat("p", 450))
	body, send := io.Pipe()
	first := make(chan error, 1)
	go func() {
		_, err := w.Stage(context.Background(), acme, one, dataset.Upload{ID: "first", Size: -1, Body: body}, none)
		first <- err
	}()
	for _, n := range []int{399, 1} { // one dataset may come in any case; who takes the last byte has counted those before
		if _, err := send.Write(bytes.Repeat([]byte("x"), n)); err != nil {
			t.Fatal(err)
		}
	}
	for _, size := range []int64{-1, 500} {
		second := &counted{left: 500}
		_, err := w.Stage(t.Context(), acme, two, dataset.Upload{ID: "second", Size: size, Body: second}, none)
		wantKind(t, "a second one", err, fault.Exhausted, "on the way")
		if size > 0 && second.left < 500 {
			t.Error("it was read although its size is known")
		}
	}
	w.eventually("what did not fit is not on the disk", func() bool { return len(w.files("blobs/tmp")) == 1 })
	send.Close()
	wantKind(t, "more than there is room for", <-first, fault.Exhausted, "datasets.max_tenant_size")
	w.stage(two, "again", strings.Repeat("o", 500)) // needs no room
}

// counted is so many bytes.
type counted struct{ left int }

func (c *counted) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n := min(len(p), c.left)
	c.left -= n
	return n, nil
}

func TestContentThatIsStillReadCounts(t *testing.T) {
	w := newWorld(t, dataset.Config{MaxTenantSize: diskspace.Charge(1000, 1)})
	w.stage(one, "a", strings.Repeat("a", 700))
	f, err := os.Open(w.file(one, "a.parquet")) // as a process in the sandbox has
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := w.Remove(t.Context(), acme, one, "a", none); err != nil {
		t.Fatal(err)
	}
	stage := func() error {
		_, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "b", Body: strings.NewReader(strings.Repeat("b", 700))}, none)
		return err
	}
	wantKind(t, "another beside it", stage(), fault.Exhausted, "datasets.max_tenant_size")
	w.restart()
	wantKind(t, "another beside it, after a restart", stage(), fault.Exhausted, "datasets.max_tenant_size")
	f.Close()
	w.restart() // which sweeps
	if err := stage(); err != nil {
		t.Error("when nobody reads it any more:", err)
	}
}

// visited is a shelf that somebody calls at while it is swept.
type visited struct {
	*local.Shelf
	visit func()
}

func (v visited) All() iter.Seq2[artifact.Ref, error] {
	return func(yield func(artifact.Ref, error) bool) {
		for r, err := range v.Shelf.All() {
			v.visit()
			if !yield(r, err) {
				return
			}
		}
	}
}

func TestNobodyWaitsForASweep(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "a", "a")
	w.close()
	index, err := sqlstore.Open(filepath.Join(w.dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	shelf, err := local.OpenShelf(filepath.Join(w.dir, "datasets"), nil)
	if err != nil {
		t.Fatal(err)
	}
	visits := 0
	w.Store = dataset.New(w.cfg, index, visited{shelf, func() { visits++; w.mount(acme, two) }}, nil, slog.New(slog.DiscardHandler))
	w.close = func() {
		if err := errors.Join(w.Store.Close(), shelf.Close(), index.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := w.Open(t.Context()); err != nil || visits != 1 {
		t.Error(visits, err)
	}
}

func TestContentGoesWithTheLastWhoSeesIt(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "a", "shared")
	w.stage(two, "a", "shared")
	w.stage(two, "b", "own")
	if err := w.Remove(t.Context(), acme, two, "b", none); err != nil {
		t.Fatal(err)
	}
	if left := w.blobs(); !slices.Equal(left, []string{digest("shared")}) {
		t.Errorf("what was removed is there still: %q", left)
	}
	wantKind(t, "to remove it again", w.Remove(t.Context(), acme, two, "b", none), fault.NotFound, "no dataset")
	if err := w.Forget(t.Context(), acme, one); err != nil {
		t.Fatal(err)
	}
	w.says("the other session has it still", two, loaded("a", "shared"))
	if err := w.Forget(t.Context(), acme, two); err != nil {
		t.Fatal(err)
	}
	if left := w.files("."); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	_, err := w.Stage(t.Context(), acme, two, dataset.Upload{ID: "late", Body: strings.NewReader("x")}, none)
	wantKind(t, "a session that is gone", err, fault.Conflict, "open it again")
	if left := w.files("."); len(left) != 0 {
		t.Errorf("what came for it: %q", left)
	}
}

func TestAKilledServerLeavesNothing(t *testing.T) {
	w := newWorld(t, dataset.Config{Alive: func(_ context.Context, session string) (bool, error) { return session != two, nil }})
	w.stage(one, "kept", "kept")
	w.stage(two, "of-the-dead", "gone")
	body, _ := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	var upload sync.WaitGroup
	upload.Go(func() { // never ends, as if the server had been killed; its row and its temporary file stay
		_, _ = w.Stage(ctx, acme, one, dataset.Upload{ID: "arriving", Body: body}, none)
	})
	w.eventually("it arrives", func() bool { return len(w.list(one)) == 2 })
	killed := w.copy()
	cancel()
	body.Close()
	upload.Wait()
	// Between the file and its row, the row and its file, and in the middle of a replacement.
	for _, stray := range []string{"stray.csv", ".new-half.csv"} {
		if err := os.Link(killed.file(one, "kept.parquet"), killed.file(one, stray)); err != nil {
			t.Fatal(err)
		}
	}
	// Content was replaced, and its row was not: what the row says counts.
	if err := errors.Join(os.Remove(killed.file(one, "kept.parquet")), os.Link(killed.file(two, "of-the-dead.parquet"), killed.file(one, "kept.parquet"))); err != nil {
		t.Fatal(err)
	}
	killed.open()
	defer func() { killed.close() }()
	killed.says("after the next start", one,
		dataset.Dataset{ID: "arriving", File: "arriving.parquet", Status: dataset.Failed, Error: "the server ended while it arrived: send it again"}, loaded("kept", "kept"))
	killed.says("the session that is gone", two)
	if diff := cmp.Diff([]string{digest("kept"), "kept.parquet"}, killed.files(".")); diff != "" {
		t.Errorf("files: %s", diff)
	}
	if text, err := os.ReadFile(killed.file(one, "kept.parquet")); err != nil || string(text) != "kept" {
		t.Errorf("the file holds %q %v", text, err)
	}
	if _, err := os.Stat(killed.file(two, "")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of a dead session: %v", err)
	}
}

// copy is the disk of a server as it is now, links included.
func (w *world) copy() *world {
	w.t.Helper()
	other := &world{t: w.t, dir: w.t.TempDir(), cfg: w.cfg}
	inodes := map[uint64]string{}
	err := filepath.WalkDir(w.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(w.dir, path)
		to := filepath.Join(other.dir, rel)
		if e.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		inode := info.Sys().(*syscall.Stat_t).Ino
		if first, there := inodes[inode]; there {
			return os.Link(first, to)
		}
		inodes[inode] = to
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(to, text, info.Mode())
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return other
}

func TestMountMendsWhatADiskLost(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "a", "rows a")
	w.stage(one, "b", "rows b")
	sum := digest("rows b")
	if err := errors.Join(os.Remove(w.file(one, "a.parquet")), os.Remove(w.file(one, "b.parquet")),
		os.Remove(filepath.Join(w.dir, "datasets/blobs/t-acme", sum[:2], sum))); err != nil {
		t.Fatal(err)
	}
	w.mount(acme, one)
	lost := loaded("b", "rows b")
	lost.Size, lost.SHA256 = 0, "" // nothing is there that would count
	lost.Status, lost.Path, lost.Error = dataset.Failed, "", "its content is gone from the server: send it again"
	w.says("what can be mended is, and the rest is told", one, loaded("a", "rows a"), lost)
	if text, err := os.ReadFile(w.file(one, "a.parquet")); err != nil || string(text) != "rows a" {
		t.Errorf("%q %v", text, err)
	}
}

func TestS4_22_S4_23_S4_24_S4_25_S4_29_S4_88_AccessDecidesWhatIsMounted(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	data := sandbox.Mount{Kind: sandbox.MountData, Source: one, Target: "/datasets", ReadOnly: true}
	host := sandbox.Mount{Kind: sandbox.MountHost, Source: "/srv/lake", Target: "/data", ReadOnly: true}
	for _, c := range []struct {
		access dataset.Access
		path   string
		want   []sandbox.Mount
		refuse string
	}{
		{dataset.AccessNone, "", nil, ""},
		{dataset.AccessLocal, "/srv/lake", []sandbox.Mount{host}, ""},
		{dataset.AccessAPI, "", []sandbox.Mount{data}, ""},
		{dataset.AccessAPI, "/srv/lake", []sandbox.Mount{data, host}, ""},
		{dataset.AccessLocal, "", nil, "need the path of a directory of the server's host"},
		{dataset.AccessLocal, "lake", nil, "not a plain absolute path"},
		{dataset.AccessLocal, "/srv/../etc", nil, "not a plain absolute path"},
		{dataset.AccessNone, "/srv/lake", nil, "use local_ro"},
	} {
		got, err := w.Mounts(t.Context(), acme, one, c.access, c.path)
		if c.refuse != "" {
			wantKind(t, string(c.access)+" "+c.path, err, fault.Invalid, c.refuse)
			continue
		}
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s %s: %s %v", c.access, c.path, diff, err)
		}
	}
	_, err := dataset.ParseAccess("HYBRID")
	wantKind(t, "an unknown access", err, fault.Invalid, "none, local_ro or api")
}

func TestS4_73_OnlySessionsWithTheAPIAreStagedInto(t *testing.T) {
	wantKind(t, "none", dataset.ErrNotStaged("k", dataset.AccessNone), fault.Conflict, "datasets access api")
	wantKind(t, "local", dataset.ErrNotStaged("k", dataset.AccessLocal), fault.Conflict, "put files into that directory")
}

func TestS4_72_AnUploadTakesNoMemory(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	const size = 160 << 20
	var most uint64
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	before := stats.HeapAlloc
	body := io.LimitReader(watching{bytes.Repeat([]byte("0123456789abcdef"), 4096), func() {
		runtime.ReadMemStats(&stats)
		most = max(most, stats.HeapAlloc)
	}}, size)
	d, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: "big", Size: size, Body: body}, none)
	if err != nil || d.Size != size || d.Status != dataset.Loaded {
		t.Fatalf("%+v %v", d, err)
	}
	if grown := int64(most) - int64(before); grown > 8<<20 {
		t.Errorf("the heap grew by %d MB", grown>>20)
	}
}

type watching struct {
	block []byte
	look  func()
}

func (w watching) Read(p []byte) (int, error) { w.look(); return copy(p, w.block), nil }

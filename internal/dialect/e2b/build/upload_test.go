package build_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
)

// stalled is a connection of a client that sends no more.
type stalled struct {
	*httptest.ResponseRecorder
	t        *testing.T
	deadline time.Time
}

func (s *stalled) SetReadDeadline(t time.Time) error { s.deadline = t; return nil }
func (s *stalled) Close() error                      { return nil }

func (s *stalled) Read([]byte) (int, error) {
	if s.deadline.IsZero() {
		s.t.Error("the body is waited for without end")
	}
	return 0, os.ErrDeadlineExceeded
}

// link is where an archive of a new template goes.
func (w *world) link(name string) string {
	w.t.Helper()
	_, asked := w.ask("POST", "/v3/templates", js{"name": name})
	_, out := w.ask("GET", "/templates/"+asked["templateID"].(string)+"/files/"+strings.Repeat("0f", 32), nil)
	return strings.TrimPrefix(out["url"].(string), "http://example.com")
}

func TestABodyIsNotWaitedForWithoutEnd(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for name, serve := range map[string]func(http.ResponseWriter, string, io.ReadCloser){
			"an upload": func(rw http.ResponseWriter, link string, body io.ReadCloser) {
				r := request("PUT", link, nil)
				r.Body = body
				w.builder.ServeUpload(rw, r)
			},
			"a request": func(rw http.ResponseWriter, _ string, body io.ReadCloser) {
				r := request("POST", "/v3/templates", nil)
				r.Body = body
				w.builder.Serve(rw, r, w.who)
			},
		} {
			rw := &stalled{ResponseRecorder: recorder(), t: t}
			serve(rw, w.link("a"), rw)
			if rw.Code != http.StatusBadRequest || !strings.Contains(rw.Body.String(), "in time") {
				t.Errorf("%s: %d %s", name, rw.Code, rw.Body)
			}
		}
	})
}

// drip is an archive that never ends and never stalls for long.
type drip struct{}

func (drip) Read(p []byte) (int, error) {
	time.Sleep(time.Minute)
	return 1, nil
}

func TestAnUploadEndsHoweverSlowItIs(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		rec, begun := recorder(), time.Now()
		w.builder.ServeUpload(rec, httptest.NewRequest("PUT", w.link("a"), drip{}))
		if took := time.Since(begun); rec.Code != http.StatusBadRequest || took > 2*time.Hour {
			t.Errorf("%d after %v: %s", rec.Code, took, rec.Body)
		}
	})
}

func TestUpload_DiskFull(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		link := w.link("a")
		send := func() *httptest.ResponseRecorder {
			rec := recorder()
			w.builder.ServeUpload(rec, httptest.NewRequest("PUT", link, strings.NewReader("an archive")))
			return rec
		}
		w.space = func(int64) error { return fault.New(fault.DiskFull, "the server's disk is full") }
		if rec := send(); rec.Code != http.StatusInsufficientStorage || !strings.Contains(rec.Body.String(), "disk is full") {
			t.Errorf("an upload to a full disk: %d %s", rec.Code, rec.Body)
		}
		w.space = nil
		if rec := send(); rec.Code != http.StatusOK {
			t.Errorf("an upload when there is space: %d %s", rec.Code, rec.Body)
		}
	})
}

// TestUpload_ManySmall has a tenant keep more archives than it may: the oldest are removed, however
// small they are.
func TestUpload_ManySmall(t *testing.T) {
	const oldest = "00000000000000000000"
	for name, c := range map[string]struct {
		maxFiles   int64
		files      int // there are before one more is sent
		least, may int
	}{
		"as many as there may be": {0, build.MaxKept, build.MaxKept, build.MaxKept},
		"each counts 4 KiB":       {1 << 20, 300, 254, 255}, // 256 would have 1 MiB without their content
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.builder.Close()
				w.maxFiles = c.maxFiles
				w.open()
				link := w.link("a")
				send := func() {
					rec := recorder()
					w.builder.ServeUpload(rec, httptest.NewRequest("PUT", link, strings.NewReader("x")))
					if rec.Code != http.StatusOK {
						t.Fatalf("%d %s", rec.Code, rec.Body)
					}
				}
				send()
				kept, err := filepath.Glob(filepath.Join(w.dir, "*", strings.Repeat("0f", 32)))
				if err != nil || len(kept) != 1 {
					t.Fatalf("the archive is at %q, %v", kept, err)
				}
				dir := filepath.Dir(kept[0])
				for i := range c.files {
					at := filepath.Join(dir, fmt.Sprintf("%020d", i))
					if err := errors.Join(os.WriteFile(at, []byte("x"), 0o600), os.Chtimes(at, time.Time{}, time.Unix(int64(i), 0))); err != nil {
						t.Fatal(err)
					}
				}
				send()
				left, err := os.ReadDir(dir)
				if err != nil {
					t.Fatal(err)
				}
				if len(left) > c.may || len(left) < c.least {
					t.Errorf("%d archives are kept, want %d to %d", len(left), c.least, c.may)
				}
				if _, err := os.Stat(filepath.Join(dir, oldest)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the oldest is there still: %v", err)
				}
				if _, err := os.Stat(kept[0]); err != nil {
					t.Errorf("the newest is gone: %v", err)
				}
			})
		})
	}
}

// held is an archive that waits, and tells when somebody reads it.
type held struct {
	read atomic.Bool
	end  chan struct{}
}

func (h *held) Read([]byte) (int, error) {
	h.read.Store(true)
	<-h.end
	return 0, io.EOF
}

func TestFewUploadsOfATenantGoOnAtATime(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		var uploads sync.WaitGroup
		send := func(link string) *held {
			h := &held{end: make(chan struct{})}
			uploads.Go(func() {
				rec := recorder()
				w.builder.ServeUpload(rec, httptest.NewRequest("PUT", link, h))
				if rec.Code != http.StatusOK {
					t.Errorf("%d %s", rec.Code, rec.Body)
				}
			})
			synctest.Wait()
			return h
		}
		link := w.link("a")
		var going []*held
		for range build.MaxUploads {
			going = append(going, send(link))
		}
		waits := send(link)
		w.who = auth.Principal{Tenant: "other"}
		others := send(w.link("a"))
		if !going[len(going)-1].read.Load() || waits.read.Load() || !others.read.Load() {
			t.Errorf("the last that may goes on: %v, one more: %v, another tenant's: %v", going[len(going)-1].read.Load(), waits.read.Load(), others.read.Load())
		}
		close(going[0].end)
		synctest.Wait()
		if !waits.read.Load() {
			t.Error("the one that waits does not go on")
		}
		for _, h := range append(going[1:], waits, others) {
			close(h.end)
		}
		uploads.Wait()
	})
}

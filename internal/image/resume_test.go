package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/template"
)

func TestCutAndResumed(t *testing.T) {
	img := newImage(t, 1, 1<<20)
	blob, _, good := firstLayer(t, img)
	half := len(good) / 2
	cut := func(times int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, blob.String()) || times == 0 {
				return false
			}
			times--
			w.Header().Set("Content-Length", fmt.Sprint(len(good)))
			w.Write(good[:half])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}
	ranges := func(p *place) (all []string) {
		for _, r := range p.asked(blob.String()) {
			all = append(all, r.Header.Get("Range"))
		}
		return all
	}
	rest := fmt.Sprintf("bytes=%d-%d", half, len(good)-1)
	t.Run("within a pull", func(t *testing.T) {
		w, p := open(t, nil), newPlace(t)
		p.behave(cut(1))
		_, err := w.pull(acme, p.push(t, "app:v1", img))
		must(t, err)
		if got := ranges(p); !slices.Equal(got, []string{"", rest}) {
			t.Fatalf("ranges: %q", got)
		}
	})
	t.Run("after a crash", func(t *testing.T) {
		w, p := open(t, nil), newPlace(t)
		part := w.PartFile(acme, blob)
		must(t, os.MkdirAll(filepath.Dir(part), 0o700))
		must(t, os.WriteFile(part, good[:half], 0o600))
		w.reopen(nil)
		_, err := w.pull(acme, p.push(t, "app:v1", img))
		must(t, err)
		if got := ranges(p); !slices.Equal(got, []string{rest}) {
			t.Fatalf("ranges: %q", got)
		}
	})
	for what, left := range map[string][]byte{"damaged": bytes.Repeat([]byte("x"), half), "complete and damaged": bytes.Repeat([]byte("x"), len(good)), "too long": append(bytes.Clone(good), 0)} {
		t.Run("after a crash that left something "+what, func(t *testing.T) {
			w, p := open(t, nil), newPlace(t)
			part := w.PartFile(acme, blob)
			must(t, os.MkdirAll(filepath.Dir(part), 0o700))
			must(t, os.WriteFile(part, left, 0o600))
			_, err := w.pull(acme, p.push(t, "app:v1", img))
			must(t, err)
			if got := ranges(p); got[len(got)-1] != "" {
				t.Fatalf("ranges: %q", got)
			}
		})
	}
	t.Run("with a registry that knows no ranges", func(t *testing.T) {
		w, p := open(t, nil), newPlace(t)
		first := cut(1)
		p.behave(func(w http.ResponseWriter, r *http.Request) bool {
			if first(w, r) {
				return true
			}
			r.Header.Del("Range")
			return false
		})
		_, err := w.pull(acme, p.push(t, "app:v1", img))
		must(t, err)
	})
	t.Run("again and again, and then given up", func(t *testing.T) {
		w, p := open(t, nil), newPlace(t)
		p.behave(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, blob.String()) {
				panic(http.ErrAbortHandler)
			}
			return false
		})
		_, err := w.pull(acme, p.push(t, "app:v1", img))
		wantKind(t, err, fault.Unavailable)
	})
	t.Run("a silent registry is asked again", func(t *testing.T) {
		w, p := open(t, nil), newPlace(t)
		w.Hurry(50 * time.Millisecond)
		silent := 1
		p.behave(func(_ http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, blob.String()) || silent == 0 {
				return false
			}
			silent--
			<-r.Context().Done()
			return true
		})
		_, err := w.pull(acme, p.push(t, "app:v1", img))
		must(t, err)
	})
}

func TestLastToLeaveEndsThePull(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	img := newImage(t, 1, 1<<20)
	blob, _, good := firstLayer(t, img)
	half := len(good) / 2
	gone := make(chan struct{})
	p.behave(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, blob.String()) || r.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(good)))
		w.Write(good[:half])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
		return true
	})
	ref := p.push(t, "app:v1", img)
	ctx, leave := context.WithCancel(t.Context())
	_, err := w.Pull(ctx, acme, template.PullRequest{Reference: ref, Progress: func(p template.PullProgress) {
		if p.Step == template.PullDownload && p.Done > 0 {
			leave()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	<-gone // the registry sees it, nobody waits any more
	_, err = w.pull(acme, ref)
	must(t, err)
	if all := p.asked(blob.String()); all[len(all)-1].Header.Get("Range") == "" {
		t.Fatal("the second pull began at the beginning")
	}
}

func TestStartSweepsLeftovers(t *testing.T) {
	w := open(t, nil)
	old, young := filepath.Join(w.dir, "images/blobs/aa/old.part"), filepath.Join(w.dir, "images/blobs/bb/young.part")
	half := filepath.Join(w.dir, "images/temp/import-1")
	for _, f := range []string{old, young, half} {
		must(t, os.MkdirAll(filepath.Dir(f), 0o700))
		must(t, os.WriteFile(f, []byte("x"), 0o600))
	}
	before := time.Now().Add(-25 * time.Hour)
	must(t, os.Chtimes(old, before, before))
	w.reopen(nil)
	if left := w.left(); !slices.Equal(left, []string{young}) {
		t.Fatalf("left: %v", left)
	}
}

func TestOurOwnFilesFailuresAreNotTheRegistrys(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "part")
	must(t, err)
	must(t, f.Close())
	for _, failure := range []error{image.ReadOn(t.Context(), f), image.Restart(t.Context(), f)} {
		if failure == nil || fault.Is(failure, fault.Unavailable) {
			t.Errorf("%v", failure)
		}
	}
}

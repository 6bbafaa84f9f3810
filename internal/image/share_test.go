package image_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/template"
)

func TestConcurrentPullsShare(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	img := newImage(t, 2, 1000)
	blob, _, _ := firstLayer(t, img)
	gate, reached := make(chan struct{}), make(chan struct{}, 10)
	p.behave(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, blob.String()) {
			reached <- struct{}{}
			select {
			case <-gate:
			case <-r.Context().Done():
			}
		}
		return false
	})
	ref := p.push(t, "app:v1", img)
	leaver, leave := context.WithCancel(t.Context())
	results := make(chan error, 10)
	go func() {
		_, err := w.Pull(leaver, acme, template.PullRequest{Reference: ref})
		results <- err
	}()
	<-reached
	var group sync.WaitGroup
	joined := make(chan struct{}, 10)
	for range 4 {
		group.Go(func() {
			var once sync.Once
			_, err := w.Pull(t.Context(), acme, template.PullRequest{Reference: ref, Progress: func(template.PullProgress) { once.Do(func() { joined <- struct{}{} }) }})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for range 4 {
		<-joined
	}
	leave()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Fatalf("who left got %v", err)
	}
	close(gate)
	group.Wait()
	if n := len(p.asked(blob.String())); n != 1 {
		t.Fatalf("the layer was asked for %d times", n)
	}
	if w.driver.count() != 2 {
		t.Fatalf("%d unpacks", w.driver.count())
	}
}

func TestOneTenantDoesNotTakeEverything(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Insecure = []string{p.host()} })
	reached, gate := make(chan struct{}, 100), make(chan struct{})
	p.behave(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			reached <- struct{}{}
			<-gate
		}
		return false
	})
	var group sync.WaitGroup
	for i := range 16 {
		group.Go(func() {
			if _, err := w.pull(acme, fmt.Sprintf("%s/many:%d", p.host(), i)); !fault.Is(err, fault.NotFound) {
				t.Error(err)
			}
		})
	}
	for range 16 {
		<-reached
	}
	_, err := w.pull(acme, p.host()+"/many:more")
	wantKind(t, err, fault.Exhausted, "wait")
	group.Go(func() {
		if _, err := w.pull(globex, p.host()+"/many:others"); !fault.Is(err, fault.NotFound) {
			t.Error(err)
		}
	})
	<-reached
	close(gate)
	group.Wait()
}

func TestPullTimeout(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.PullTimeout = 50 * time.Millisecond })
	p.behave(func(_ http.ResponseWriter, r *http.Request) bool {
		if isPart(r) {
			<-r.Context().Done()
		}
		return false
	})
	_, err := w.pull(acme, p.push(t, "slow:v1", newImage(t, 1, 100)))
	wantKind(t, err, fault.Timeout, "slow:v1")
}

func TestCloseEndsPulls(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	reached := make(chan struct{})
	p.behave(func(_ http.ResponseWriter, r *http.Request) bool {
		if isPart(r) {
			close(reached)
			<-r.Context().Done()
		}
		return false
	})
	ref := p.push(t, "slow:v1", newImage(t, 1, 100))
	failed := make(chan error)
	go func() {
		_, err := w.pull(acme, ref)
		failed <- err
	}()
	<-reached
	w.Close()
	wantKind(t, <-failed, fault.Unavailable, "ending")
	_, err := w.pull(acme, ref)
	wantKind(t, err, fault.Unavailable)
}

package chaos_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/testserver"
)

// thousand is how many sandboxes live through a restart of their server.
const thousand = 1000

// TestThousandSandboxes restarts the server of a thousand living sandboxes, in order and by
// SIGKILL. Every one of them keeps its kernel, and ends when it is asked to.
func TestThousandSandboxes(t *testing.T) {
	f := begin(t, "server: SIGTERM, then kill -9, with 1,000 living sandboxes")
	s := testserver.New(f)
	before := withZygotes(f.count(s, nil), thousand/perZygote+1)
	all := make([]resident, thousand)
	f.each(len(all), func(i int) error {
		return f.ask(func(ctx context.Context) error {
			sb, err := s.Create(ctx, client.CreateRequest{TimeoutSeconds: 3600})
			if err != nil {
				return err
			}
			all[i] = resident{id: sb.ID, secret: rand.Text()}
			return wants(ctx, sb, fmt.Sprintf("kept = %q; kept", all[i].secret), fmt.Sprintf("'%s'", all[i].secret))
		})
	})
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		began := time.Now()
		s.Signal(f, signal)
		f.note("the server ended %.1f s after %v", time.Since(began).Seconds(), signal)
		s.Start(f)
		f.serves(s, began, soon)
		f.note("after %v a new sandbox answered in %.1f s", signal, f.row.Service)
		f.each(len(all), func(i int) error {
			return f.ask(func(ctx context.Context) error {
				return wants(ctx, s.Sandbox(all[i].id), "kept", "'"+all[i].secret+"'")
			})
		})
	}
	f.each(len(all), func(i int) error { return f.ask(s.Sandbox(all[i].id).Kill) })
	f.onlySaw("ok")
	f.nothingLeft(s, nil, before)
}

// perZygote is how many living kernels the maker gives one zygote.
const perZygote = 512

// withZygotes is a census that has so many more zygotes. Those that a crowd needed stay until they
// are six hours old, each with its cgroups and with the two processes of its own sandbox.
func withZygotes(c testserver.Census, n int) testserver.Census {
	more := maps.Clone(c)
	more["zygotes"] += n
	more["cgroups"] += 5 * n
	more["processes"] += 2 * n
	more["zygotes' children"] += n
	return more
}

// each calls do for every index, some at the same time. An error is something lost.
func (f *fault) each(n int, do func(i int) error) {
	f.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 4 * clients {
		wg.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					f.lost("sandbox %d: %v", i, err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

package app

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// busyHost is a store whose builds fail until the host's package manager has finished.
type busyHost struct {
	builds, busyFor int
	then            error // of the build after these
	met             func()
}

func (h *busyHost) Resolve(context.Context, string) (*template.Template, error) {
	return &template.Template{Digest: "old"}, nil
}

func (h *busyHost) Ensure(context.Context, string, func(template.Progress)) (*template.Template, error) {
	h.builds++
	if h.builds <= h.busyFor {
		if h.met != nil {
			h.met()
		}
		return nil, fault.Wrap(fault.Unavailable, template.ErrDpkgBusy, "it is at work")
	}
	return &template.Template{Digest: "new"}, h.then
}

func (h *busyHost) Rebuild(ctx context.Context, name string, progress func(template.Progress)) (*template.Template, error) {
	return h.Ensure(ctx, name, progress)
}

func (h *busyHost) Refresh() error { return nil }

// noPause has tries follow each other at once.
func noPause(t *testing.T) {
	before := renewPause
	renewPause = 0
	t.Cleanup(func() { renewPause = before })
}

func TestRenewal_PackageManagerBusy(t *testing.T) {
	noPause(t)
	for name, c := range map[string]struct {
		host   busyHost
		builds int
		says   []string
	}{
		"it finishes":        {busyHost{busyFor: 3}, 4, []string{"x built new"}},
		"it does not finish": {busyHost{busyFor: 1000}, renewTries, []string{"x failed it is at work: the host's package manager is at work"}},
		"another failure":    {busyHost{then: errors.New("no space")}, 1, []string{"x failed no space"}},
	} {
		t.Run(name, func(t *testing.T) {
			var said []string
			r := renewer{store: &c.host, say: func(name, state, message string) { said = append(said, name+" "+state+" "+message) }}
			r.add(renewalJob{name: "x", build: c.host.Ensure})
			if err := r.work(t.Context(), nil); err != nil || c.host.builds != c.builds || !slices.Equal(said, c.says) {
				t.Errorf("%v; %d builds and %q, want %d and %q", err, c.host.builds, said, c.builds, c.says)
			}
		})
	}
	t.Run("the server ends", func(t *testing.T) {
		renewPause = 1 << 62
		ctx, cancel := context.WithCancel(t.Context())
		host := busyHost{busyFor: 1000, met: cancel}
		r := renewer{store: &host, say: func(_, state, _ string) { t.Errorf("it said %s", state) }}
		r.add(renewalJob{name: "x", build: host.Ensure})
		if err := r.work(ctx, nil); err == nil || host.builds != 1 {
			t.Errorf("%v; %d builds", err, host.builds)
		}
	})
}

// TestRenewal_DamagedFirst has a template that is outdated wait for the host's package manager
// while others are damaged: no sandbox starts from these.
func TestRenewal_DamagedFirst(t *testing.T) {
	noPause(t)
	var said []string
	r := renewer{store: &busyHost{}, rebuilt: map[string]rebuilds{}}
	r.say = func(name, state, _ string) { said = append(said, name+" "+state) }
	orders := make(chan string, 2)
	tries := map[string]int{}
	build := func(_ context.Context, name string, _ func(template.Progress)) (*template.Template, error) {
		tries[name]++
		said = append(said, name)
		if name == "outdated" && tries[name] == 1 {
			orders <- "ordered" // the server finds one that does not work
			orders <- "ordered"
			close(orders)
		}
		if name != "whole" && tries[name] < 3 {
			return nil, template.ErrDpkgBusy
		}
		return &template.Template{Digest: "new"}, nil
	}
	r.add(renewalJob{name: "outdated", build: build})
	r.add(renewalJob{name: "damaged", damaged: true, build: build})
	r.add(renewalJob{name: "whole", damaged: true, build: build})
	if err := r.work(t.Context(), orders); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"damaged", "whole", "whole built", "damaged", "damaged", "damaged built",
		"outdated", "ordered built", "outdated", "outdated", "outdated built",
	}
	if !slices.Equal(said, want) {
		t.Errorf("the builds are %q, want %q", said, want)
	}
}

// TestRenewal_OrdersThatWait has the server want more templates built than may wait.
func TestRenewal_OrdersThatWait(t *testing.T) {
	said := map[string]string{}
	say := func(name, state, message string) { said[name] = state + " " + message }
	var lines strings.Builder
	for i := range maxOrders + 1 {
		fmt.Fprintf(&lines, "%s%d\n", renewRebuild, i)
	}
	last, want := strconv.Itoa(maxOrders), map[string]string{}
	want[last] = renewFailed + " " + tooManyOrders

	ended := make(chan struct{})
	orders := readOrders(strings.NewReader(lines.String()), func() { close(ended) }, say)
	<-ended
	if !maps.Equal(said, want) || len(orders) != maxOrders {
		t.Errorf("%d orders wait to be read, and the server is told %q, want %q", len(orders), said, want)
	}

	clear(said)
	r := renewer{store: &busyHost{}, say: say, rebuilt: map[string]rebuilds{}}
	for i := range maxOrders + 1 {
		r.order(strconv.Itoa(i))
	}
	if !maps.Equal(said, want) || len(r.queue) != maxOrders {
		t.Errorf("%d orders wait to be built, and the server is told %q, want %q", len(r.queue), said, want)
	}
}

// TestRebuild_Counts orders builds: only what was built makes the next order wait longer.
func TestRebuild_Counts(t *testing.T) {
	noPause(t)
	unknown := fault.New(fault.NotFound, "no such template")
	for name, c := range map[string]struct {
		host busyHost
		want int
	}{
		"the package manager finishes":        {busyHost{busyFor: 9}, 1},
		"the package manager does not finish": {busyHost{busyFor: 1000}, 0},
		"a build fails":                       {busyHost{then: errors.New("no space")}, 1},
		"no such template":                    {busyHost{then: unknown}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := renewer{store: &c.host, say: func(string, string, string) {}, rebuilt: map[string]rebuilds{}}
			r.order("x")
			if err := r.work(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if got := r.rebuilt["x"].times; got != c.want {
				t.Errorf("%d builds count, want %d", got, c.want)
			}
		})
	}
}

// TestRebuilds_Rest has a template damaged again as soon as it may be built.
func TestRebuilds_Rest(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var b rebuilds
	if rest := b.rest(now); rest != 0 {
		t.Errorf("a template that was never built rests for %v", rest)
	}
	begin, builds := now, 0
	for ; now.Sub(begin) < 30*24*time.Hour; now = now.Add(b.rest(now)) {
		b = b.next(now)
		builds++
		if rest := b.rest(now.Add(-time.Second)); rest <= 0 || rest > rebuildRestMax+time.Second {
			t.Fatalf("after build %d it rests for %v", builds, rest)
		}
	}
	if builds < 30 || builds > 40 {
		t.Errorf("%d builds in thirty days, want one a day and a few more", builds)
	}
	b = b.next(now.Add(3 * rebuildRestMax))
	if rest := b.rest(b.last); rest != rebuildRest {
		t.Errorf("a template that was whole for days rests for %v, want %v", rest, rebuildRest)
	}
}

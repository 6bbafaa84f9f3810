package app

import (
	"context"
	"errors"
	"slices"
	"testing"

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

func TestRenewal_PackageManagerBusy(t *testing.T) {
	before := renewPause
	renewPause = 0
	defer func() { renewPause = before }()
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
			renewOne(t.Context(), &c.host, "x", c.host.Ensure, func(name, state, message string) { said = append(said, name+" "+state+" "+message) })
			if c.host.builds != c.builds || !slices.Equal(said, c.says) {
				t.Errorf("%d builds and %q, want %d and %q", c.host.builds, said, c.builds, c.says)
			}
		})
	}
	t.Run("the server ends", func(t *testing.T) {
		renewPause = 1 << 62
		ctx, cancel := context.WithCancel(t.Context())
		host := busyHost{busyFor: 1000, met: cancel}
		renewOne(ctx, &host, "x", host.Ensure, func(_, state, _ string) { t.Errorf("it said %s", state) })
		if host.builds != 1 {
			t.Errorf("%d builds", host.builds)
		}
	})
}

package cgroup

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freezePatience is how long the tasks of a group may take to stop. An idle group takes a fifth of a millisecond; one
// whose tasks wait for a disk in a way that nothing can interrupt takes as long as the disk does, and one that has used
// up its processor time takes seconds, because each of its tasks must run to stop.
const freezePatience = 20 * time.Second

// freezeMoment is how long they are looked at without a pause.
const freezeMoment = 200 * time.Microsecond

// ErrNoFreezer is a host on which groups cannot be frozen.
var ErrNoFreezer = errors.New("this host has no cgroup freezer")

// ErrBusy is a group that did not stop within its time; it runs on.
var ErrBusy = errors.New("its processes did not stop in time")

// Freezer tells whether groups can be frozen: on v1 by a hierarchy of its own, on v2 since Linux 5.2.
func (r *Root) Freezer() bool {
	for _, h := range r.dirs {
		if !slices.Contains(h.controllers, "freezer") {
			continue
		}
		if r.version == V1 {
			return true
		}
		return unix.Faccessat(int(h.dir.Fd()), "cgroup.freeze", unix.W_OK, 0) == nil
	}
	return false
}

// CanFreeze reports whether Freeze is possible on this host.
func (g *Group) CanFreeze() bool { return g.root.Freezer() }

// Freeze returns when every task of the group has stopped, or lets all of them go on and says why. What is born into the
// group while it is frozen does not run either.
func (g *Group) Freeze() error {
	if !g.root.Freezer() {
		return ErrNoFreezer
	}
	p := g.part("freezer")
	freeze, stopped := "cgroup.freeze", "cgroup.events"
	if g.root.version == V1 {
		freeze, stopped = "freezer.state", "freezer.state"
	}
	begun := time.Now()
	for wait := 20 * time.Microsecond; ; {
		// On v1 written again each time: a task that was being born at the first write may have been missed.
		if err := p.write(freeze, freezeValue(g.root.version, true)); err != nil {
			return g.unfreeze(err)
		}
		text, err := p.read(stopped)
		if err != nil {
			return g.unfreeze(err)
		}
		if isFrozen(g.root.version, text) {
			return nil
		}
		switch took := time.Since(begun); {
		case took > freezePatience:
			return g.unfreeze(ErrBusy)
		case took < freezeMoment:
			runtime.Gosched() // idle ones stop sooner than a sleeper wakes up
		default:
			time.Sleep(wait) // v1 tells nobody when the last task has stopped
			wait = min(2*wait, 5*time.Millisecond)
		}
	}
}

// StartFreeze has the tasks of a group stop and does not wait until they have: a task in a system call stops when it
// returns from it. On v1 a task that is being born may be missed; call it again.
func (g *Group) StartFreeze() error {
	if !g.root.Freezer() {
		return ErrNoFreezer
	}
	file := "cgroup.freeze"
	if g.root.version == V1 {
		file = "freezer.state"
	}
	return g.part("freezer").write(file, freezeValue(g.root.version, true))
}

func (g *Group) unfreeze(err error) error {
	return fmt.Errorf("freeze cgroup %s: %w", g.name, errors.Join(err, g.Thaw()))
}

// Thaw lets a frozen group go on; one that runs stays as it is.
func (g *Group) Thaw() error {
	p := g.part("freezer")
	if p.parent == nil {
		return nil // removed, or a host without a freezer: nothing of it is frozen
	}
	file := "cgroup.freeze"
	if g.root.version == V1 {
		file = "freezer.state"
	}
	return p.write(file, freezeValue(g.root.version, false))
}

func freezeValue(v Version, freeze bool) string {
	switch {
	case v == V1 && freeze:
		return "FROZEN"
	case v == V1:
		return "THAWED"
	case freeze:
		return "1"
	default:
		return "0"
	}
}

// isFrozen reads freezer.state of v1, which says FREEZING meanwhile, or cgroup.events of v2.
func isFrozen(v Version, text string) bool {
	if v == V1 {
		return strings.TrimSpace(text) == "FROZEN"
	}
	return slices.Contains(strings.Split(text, "\n"), "frozen 1")
}

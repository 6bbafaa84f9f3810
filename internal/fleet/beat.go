package fleet

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// keepBeating says that this server lives, until Leave. Nothing that takes long happens here.
func (f *Fleet) keepBeating() {
	ticker := time.NewTicker(f.cfg.Every)
	defer ticker.Stop()
	for {
		select {
		case <-f.life.Done():
			return
		case <-ticker.C:
		}
		err := f.beat(f.life)
		if errors.Is(err, sandbox.ErrExpelled) {
			f.log.Warn("the other servers took this one for dead; joining them again under another name", "server", f.Me())
			err = f.enter(f.life)
		}
		if err != nil && f.life.Err() == nil {
			f.log.Warn("the other servers were not told that this one lives", "server", f.Me(), "error", err)
		}
	}
}

// beat is one sign of life.
func (f *Fleet) beat(ctx context.Context) error {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, f.cfg.Dead)
	defer cancel()
	all, taken, err := f.store.Beat(ctx, f.Me(), f.cfg.Dead)
	if err != nil {
		return err
	}
	f.mu.Lock()
	before := f.all
	f.all, f.beaten = all, begun
	f.pending = append(f.pending, taken...)
	f.endLives()
	f.mu.Unlock()
	if !sameServers(before, all) {
		first, _ := f.First()
		f.log.Info("servers of this database", "count", len(all), "first", first.ID, "this", f.Me())
		f.peers.CloseIdleConnections() // those to servers that are gone among them
		f.owners.clear()
	}
	f.wake()
	return nil
}

// endLives ends what goes on with servers that are gone; mu is held. One that hangs, or whose machine is lost, would never say so.
func (f *Fleet) endLives() {
	for id, one := range f.alive {
		if !slices.ContainsFunc(f.all, func(s sandbox.Server) bool { return s.ID == id }) {
			one.end()
			delete(f.alive, id)
		}
	}
}

// whileAlive is until a server is gone.
func (f *Fleet) whileAlive(id string) context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	if one, ok := f.alive[id]; ok {
		return one
	}
	ctx, end := context.WithCancel(context.Background()) // the other server's, which the next look ends when it is gone
	f.alive[id] = life{ctx, end}
	return ctx
}

// lookAgain asks who lives before it is time to, unless that was done just now. It is nobody's request: what is given to this server
// on the way must not be lost with a caller who leaves.
func (f *Fleet) lookAgain() bool {
	f.mu.Lock()
	fresh := time.Since(f.beaten) < f.cfg.Every/10
	f.mu.Unlock()
	return !fresh && f.beat(f.life) == nil
}

func sameServers(a, b []sandbox.Server) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func (f *Fleet) wake() {
	select {
	case f.news <- struct{}{}:
	default:
	}
}

// Work does what falls to this server, until ctx ends: it takes over, takes office when it is the first and lets go of everything
// when it was expelled. It tells begun when there is nothing left to take over from before.
func (f *Fleet) Work(ctx context.Context, domain Sandboxes, office Office, begun func()) {
	f.mu.Lock()
	f.domain = domain
	f.mu.Unlock()
	look := time.NewTicker(f.cfg.Look)
	defer look.Stop()
	for {
		if f.step(ctx, domain, office) && begun != nil {
			begun()
			begun = nil
		}
		select {
		case <-ctx.Done():
			f.resign(office)
			return
		case <-f.news:
		case <-look.C:
			_, mine := f.First()
			if err := domain.Reconcile(ctx, mine); err != nil && ctx.Err() == nil {
				f.log.Warn("what the driver has could not be compared with the database", "error", err)
			}
		}
	}
}

// step brings this server to where it should be; it reports whether it is there.
func (f *Fleet) step(ctx context.Context, domain Sandboxes, office Office) bool {
	f.mu.Lock()
	gone, me, records := f.gone, f.me.ID, f.pending
	f.gone = false
	f.mu.Unlock()
	if gone {
		domain.Expelled(me)
		f.resign(office)
	}
	if err := domain.TakeOver(ctx, records); err != nil {
		if ctx.Err() == nil {
			f.log.Warn("sandboxes of another server are not taken over yet", "count", len(records), "error", err)
		}
		return false // the next sign of life tries again
	}
	f.mu.Lock()
	if !f.gone {
		f.pending = f.pending[len(records):]
	}
	taken := f.office
	f.mu.Unlock()
	_, mine := f.First()
	switch {
	case mine && taken, !mine && !taken:
		return true
	case taken: // which the order of servers does not let happen; two in office would be worse than none
		f.resign(office)
		return true
	}
	if err := office.Take(ctx); err != nil {
		if ctx.Err() == nil {
			f.log.Warn("this server is the first and cannot do yet what that brings", "error", err)
		}
		return false
	}
	f.mu.Lock()
	f.office = true
	f.mu.Unlock()
	f.log.Info("this server is the first", "server", me)
	return true
}

func (f *Fleet) resign(office Office) {
	f.mu.Lock()
	taken := f.office
	f.office = false
	f.mu.Unlock()
	if taken {
		office.Resign()
	}
}

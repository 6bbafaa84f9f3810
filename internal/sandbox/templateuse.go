package sandbox

import (
	"context"
	"sync"
)

// templateUses keeps a template's files in place while a sandbox starts from it. A removal waits for the creates that hold
// the template; creates that come later wait for the removal and then do not find the template.
type templateUses struct {
	mu  sync.Mutex
	all map[templateKey]*templateUse
}

type templateKey struct{ tenant, name string }

type templateUse struct {
	creates  int
	removals int // under way or waiting
	removing bool
	changed  chan struct{} // closed at the next change; nil: nothing waits for it
}

// hold is what a create does from before it resolves a template's name until its sandbox has started.
func (u *templateUses) hold(ctx context.Context, tenant, name string) (letGo func(), err error) {
	key := templateKey{tenant, name}
	u.mu.Lock()
	defer u.mu.Unlock()
	for u.use(key).removals > 0 {
		if err := u.wait(ctx, key); err != nil {
			return nil, err
		}
	}
	u.use(key).creates++
	return func() { u.change(key, func(t *templateUse) { t.creates-- }) }, nil
}

// remove is what a removal does before it begins.
func (u *templateUses) remove(ctx context.Context, tenant, name string) (done func(), err error) {
	key := templateKey{tenant, name}
	u.mu.Lock()
	defer u.mu.Unlock()
	t := u.use(key)
	t.removals++
	for t.creates > 0 || t.removing {
		if err := u.wait(ctx, key); err != nil {
			t.removals--
			u.tell(key)
			return nil, err
		}
	}
	t.removing = true
	return func() { u.change(key, func(t *templateUse) { t.removals--; t.removing = false }) }, nil
}

// wait returns at the next change of a template's use, or with the context; mu is held before and after.
func (u *templateUses) wait(ctx context.Context, key templateKey) error {
	t := u.use(key)
	if t.changed == nil {
		t.changed = make(chan struct{})
	}
	changed := t.changed
	u.mu.Unlock()
	defer u.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return waitError(ctx, "template "+key.name)
	}
}

func (u *templateUses) change(key templateKey, f func(*templateUse)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	f(u.use(key))
	u.tell(key)
}

// tell wakes what waits and forgets a template without use; mu is held.
func (u *templateUses) tell(key templateKey) {
	t := u.use(key)
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
	if t.creates == 0 && t.removals == 0 {
		delete(u.all, key)
	}
}

// use is the entry of a template; mu is held.
func (u *templateUses) use(key templateKey) *templateUse {
	t := u.all[key]
	if t == nil {
		t = &templateUse{}
		if u.all == nil {
			u.all = map[templateKey]*templateUse{}
		}
		u.all[key] = t
	}
	return t
}

package artifact

import (
	"context"
	"time"
)

// Swept is what a sweep removed.
type Swept struct {
	Artifacts, Blobs int
}

// sweepAllEvery is after how many sweeps all contents are looked at once more.
const sweepAllEvery = 144

// sweeps sweeps from time to time until the keeper closes; all of it at first, for what a server that died has left.
func (k *Keeper) sweeps(ctx context.Context) {
	tick := time.NewTicker(k.cfg.SweepEvery)
	defer tick.Stop()
	for i := 0; ; i++ {
		sweep := k.expire
		if i%sweepAllEvery == 0 {
			sweep = k.Sweep
		}
		if swept, err := sweep(ctx); err != nil && ctx.Err() == nil {
			k.cfg.Log.Warn("sweep of artifacts failed; the next one tries again", "error", err)
		} else if swept != (Swept{}) {
			k.cfg.Log.Info("artifacts swept", "artifacts", swept.Artifacts, "blobs", swept.Blobs)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Sweep removes artifacts whose time is over, and every content that no artifact has. One at a time: so whoever waited for it
// finds nothing that another sweep is about to remove.
func (k *Keeper) Sweep(ctx context.Context) (Swept, error) {
	k.sweeping.Lock()
	defer k.sweeping.Unlock()
	s, err := k.expire(ctx)
	if err != nil {
		return s, err
	}
	for r, err := range k.blobs.All() {
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return s, err
		}
		if err := s.reap(ctx, k, r); err != nil {
			return s, err
		}
	}
	return s, nil
}

// expireAtOnce is how many rows one transaction of a sweep removes.
const expireAtOnce = 500

// expire removes artifacts whose time is over with their contents, and keys of links that are all over.
func (k *Keeper) expire(ctx context.Context) (s Swept, err error) {
	for {
		refs, err := k.index.RemoveExpired(ctx, time.Now(), expireAtOnce)
		if err != nil {
			return s, err
		}
		s.Artifacts += len(refs)
		for _, r := range refs {
			if err := s.reap(ctx, k, r); err != nil {
				return s, err
			}
		}
		if len(refs) < expireAtOnce {
			break
		}
	}
	if err := k.index.DropLinkKeys(ctx, time.Now()); err != nil {
		return s, err
	}
	return s, k.firstKey(ctx) // another server may have made a new one
}

func (s *Swept) reap(ctx context.Context, k *Keeper, r Ref) error {
	removed, err := k.reap(ctx, r)
	if removed {
		s.Blobs++
	}
	return err
}

// reap removes a content that no artifact has, unless somebody is about to name it.
func (k *Keeper) reap(ctx context.Context, r Ref) (bool, error) {
	release, ok := k.claims.doom(r)
	if !ok {
		return false, nil
	}
	defer release()
	named, err := k.index.BlobNamed(ctx, r)
	if err != nil || named {
		return false, err
	}
	k.cfg.Step("reaping")
	return true, k.blobs.Remove(r.Tenant, r.SHA256)
}

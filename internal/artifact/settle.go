package artifact

import (
	"context"

	"github.com/covehq/cove/internal/fault"
)

// A server that is killed loses nothing of what it has kept. A host that loses power may lose a blob whose row it has not:
// forcing each to the disk first would have every run wait for all that is dirty there. So that is done right after, by a
// goroutine of the keeper's, and a mark says up to which row; rows after it are looked at when the next server starts.

// settler wakes whoever forces blobs to the disk.
type settler chan struct{}

func (s settler) wake() {
	select {
	case s <- struct{}{}:
	default: // it is awake already
	}
}

// settles forces blobs to the disk whenever some were kept, and once more at the end.
func (k *Keeper) settles(ctx context.Context) {
	for {
		select {
		case <-k.settler:
			k.settle(ctx)
		case <-ctx.Done():
			select {
			case <-k.settler:
				k.settle(context.WithoutCancel(ctx)) // the keeper waits for it
			default:
			}
			return
		}
	}
}

func (k *Keeper) settle(ctx context.Context) {
	last, err := k.index.LastArtifact(ctx)
	if err == nil {
		err = k.blobs.Sync(ctx)
	}
	if err == nil {
		err = k.index.SettleArtifacts(ctx, last)
	}
	if err != nil && ctx.Err() == nil {
		k.cfg.Log.Warn("artifacts were not forced to the disk; the next ones bring them along", "error", err)
	}
}

// recover looks at what a server before this one kept in its last moments, and forgets what the host has lost.
func (k *Keeper) recover(ctx context.Context) error {
	list, err := k.index.UnsettledArtifacts(ctx)
	if err != nil {
		return err
	}
	for _, a := range list {
		c, err := k.open(ctx, a)
		if err == nil {
			err = c.Close()
		}
		if fault.Is(err, fault.Gone) || isDamaged(err) {
			k.cfg.Log.Warn("an artifact was lost with the host's power", "artifact", a.ID, "tenant", a.Tenant, "error", err)
			err = k.index.RemoveArtifact(ctx, a.Tenant, a.ID)
		}
		if err != nil {
			return err
		}
	}
	if len(list) > 0 {
		k.settler.wake()
	}
	return nil
}

package main

import (
	"context"
	"fmt"
	"time"
)

// until asks again and again whether something holds, for as long as ctx lives and at most limit. The answer false may
// come with a reason, which is told when time is up; errStop ends the wait.
func until(ctx context.Context, limit time.Duration, what string, holds func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := holds(ctx)
		if ok {
			return nil
		}
		if stop, is := err.(errStop); is { //nolint:errorlint // it is never wrapped
			return fmt.Errorf("%s: %w", what, stop.error)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if err == nil {
				err = ctx.Err()
			}
			return fmt.Errorf("%s: not within %s: %w", what, limit, err)
		}
	}
}

// errStop is an answer that no waiting will change.
type errStop struct{ error }

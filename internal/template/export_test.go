package template

import (
	"context"
	"time"
)

// SetDpkgPatience bounds how long a build waits for the host's package manager, until restore.
func SetDpkgPatience(d time.Duration) (restore func()) {
	before := dpkgPatience
	dpkgPatience = d
	return func() { dpkgPatience = before }
}

// Together has a command end with what it starts.
var Together = together

// Inspect asks an interpreter twice by one cache, and counts the probes.
func Inspect(ctx context.Context, executable string) (probes int, err error) {
	c := &pythonCache{}
	for range 2 {
		_, err = c.inspect(ctx, executable, func() { probes++ })
	}
	return probes, err
}

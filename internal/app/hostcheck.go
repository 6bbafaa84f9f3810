package app

import (
	"context"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/native/hostcheck"
)

// checkNative is the driver's own look at this host.
func checkNative(ctx context.Context, cfg config.Config) []Finding {
	var all []Finding
	for _, f := range hostcheck.Check(ctx, hostcheck.Options{DataDir: cfg.DataDir}) {
		all = append(all, Finding{Name: f.Name, Level: string(f.Level), Detail: f.Detail, Remedy: f.Remedy})
	}
	return append(all, checkPromises(ctx, cfg)...)
}

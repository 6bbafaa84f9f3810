package app

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
)

// openNative finds the maker of this data directory or starts it. The maker keeps all privilege and outlives us.
func openNative(ctx context.Context, cfg config.Config, log *slog.Logger) (parts, error) {
	t, err := openTemplates(cfg, log)
	if err != nil {
		return parts{}, err
	}
	d, err := native.Open(ctx, native.Config{DataDir: cfg.DataDir, Log: log, Launch: native.LaunchSelf()})
	if err != nil {
		return parts{}, err
	}
	return parts{driver: d, templates: t, dropPrivilege: true, most: hostLimits(cfg.DataDir)}, nil
}

// Internal runs the commands that this binary has for its own parts and not for people: the native driver starts them
// from /proc/self/exe. ok is false when args name none of them.
func Internal(args []string, stderr io.Writer) (status int, ok bool) {
	if len(args) == 0 {
		return 0, false
	}
	var err error
	switch args[0] {
	case "maker":
		err = maker.Main(args[1:], native.Tag, []string{"/proc/self/exe", "resolver"})
	case "resolver":
		return resolver.Main(args[1:], stderr), true
	default:
		return 0, false
	}
	if err != nil {
		fmt.Fprintln(stderr, "cove "+args[0]+":", err)
		return 1, true
	}
	return 0, true
}

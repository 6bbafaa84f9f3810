package app

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/resolver"
	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/telemetry"
)

// openNative finds the maker of this data directory, or starts one: it is this same program with another command.
func openNative(ctx context.Context, cfg config.Config, log *slog.Logger) (parts, error) {
	t, err := openTemplates(cfg, log)
	if err != nil {
		return parts{}, err
	}
	if os.Geteuid() == 0 { // later, and for anybody else, the file is root's
		err := native.AllowStorage(cfg.DataDir, native.Storage{
			HostPaths: cfg.Storage.HostPaths, VolumeSize: int64(cfg.Storage.VolumeSize), MaxVolumeSize: int64(cfg.Storage.MaxVolumeSize),
			Reserve: int64(cfg.Storage.Reserve), MaxTenantSize: int64(cfg.Storage.MaxTenantSize),
		})
		if err != nil {
			return parts{}, fmt.Errorf("storage: %w", err)
		}
		if err := allowNetworks(cfg); err != nil {
			return parts{}, fmt.Errorf("network: %w", err)
		}
	}
	launched := false
	launch := native.LaunchSelf("--server-uid", strconv.Itoa(laterUID(cfg.DataDir)))
	d, err := native.Open(ctx, native.Config{DataDir: cfg.DataDir, Log: log, Launch: func(ctx context.Context, dataDir string) error {
		launched = true
		return launch(ctx, dataDir)
	}})
	if err != nil {
		return parts{}, err
	}
	closeDriver := d.Close
	if cfg.Ephemeral && launched {
		closeDriver = func() error {
			// Nobody will ask for it again, and it holds root: it ends with the one who started it.
			if err := d.Shutdown(context.Background()); err != nil {
				return err
			}
			return d.Close()
		}
	}
	disk := &diskNote{}
	return parts{
		driver: d, templates: t, dropPrivilege: true, most: hostLimits(cfg.DataDir), close: closeDriver,
		ready: disk.after(d.Ready, d.Stats), disk: disk, spoilt: d.Spoilt, stats: makerStats(d),
	}, nil
}

// allowNetworks tells the maker which private networks lists may name.
func allowNetworks(cfg config.Config) error {
	rules, err := networkRules(cfg)
	if err != nil {
		return err
	}
	return native.AllowNetworks(cfg.DataDir, rules)
}

// makerStats asks the maker in the words of the metrics.
func makerStats(d *native.Driver) func(context.Context) (telemetry.Maker, error) {
	return func(ctx context.Context) (telemetry.Maker, error) {
		s, err := d.Stats(ctx)
		m := telemetry.Maker{
			Sandboxes: s.Sandboxes, Ending: s.Dying, Pooled: s.Pooled, Slots: s.Slots, FDs: s.FDs, Goroutines: s.Goroutine,
			CPUSeconds: float64(s.CPUMS) / 1000, MemoryBytes: s.Memory,
		}
		if s.Disk != nil {
			m.Disk = &telemetry.Disk{Used: s.Disk.Used, Promised: s.Disk.Promised, Reserve: s.Disk.Reserve}
		}
		for _, z := range s.Zygotes {
			m.Zygotes = append(m.Zygotes, telemetry.Zygote{Template: z.Template, Forks: z.Forks, Children: z.Live, MemoryBytes: z.RSSKB << 10})
		}
		return m, err
	}
}

// Internal runs the commands that this program starts itself with; people rarely type them. It reports whether the
// arguments named one, and its exit status.
func Internal(args []string, stdin io.Reader, stdout, stderr io.Writer) (status int, ok bool) {
	if len(args) == 0 {
		return 0, false
	}
	var err error
	switch args[0] {
	case "maker":
		err = maker.Main(args[1:], native.Tag, []string{"/proc/self/exe", "resolver"})
	case "resolver":
		return resolver.Main(args[1:], stderr), true
	case "unpack":
		return unpack.Main(args[1:], stderr), true
	case renewCommand:
		err = renewMain(args[1:], stdin, stdout)
	case heraldCommand:
		err = heraldMain(args[1:], stdin)
	default:
		return 0, false
	}
	if err != nil {
		fmt.Fprintln(stderr, "cove "+args[0]+":", err)
		return 1, true
	}
	return 0, true
}

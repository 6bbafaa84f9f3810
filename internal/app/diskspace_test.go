package app_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
)

func TestSpaceCheck(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "server"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		driver  string
		reserve config.Size
		bytes   int64
		full    bool
	}{
		"there is room":              {config.DriverNative, 1, 1, false},
		"free space is the reserve":  {config.DriverNative, 1 << 60, 0, true},
		"more than what is free":     {config.DriverNative, 1, 1 << 60, true},
		"no sandbox is on this disk": {config.DriverInproc, 1 << 60, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Config{DataDir: dir, Driver: c.driver}
			cfg.Storage.Reserve = c.reserve
			if err := app.SpaceCheck(cfg).Allow(c.bytes); fault.Is(err, fault.DiskFull) != c.full || (err != nil) != c.full {
				t.Errorf("a write of %d bytes with a reserve of %d: %v", c.bytes, c.reserve, err)
			}
		})
	}
}

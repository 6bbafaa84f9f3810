package app

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/kernel"
)

// openInproc is for tests: everything runs on this host, as this user.
func openInproc(cfg config.Config, log *slog.Logger) (parts, error) {
	log.Warn("the inproc driver isolates nothing: what runs in a sandbox runs on this host")
	dir := filepath.Join(cfg.DataDir, "inproc")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return parts{}, err
	}
	if err := writeKernel(dir); err != nil {
		return parts{}, err
	}
	d, err := newInproc(inproc.Config{Kernel: filepath.Join(dir, "kernel.py")})
	if err != nil {
		return parts{}, errors.Join(err, os.RemoveAll(dir))
	}
	return parts{driver: d, templates: newHostTemplates(), close: d.Close}, nil
}

// newInproc makes the driver. Servers of one test share one: its sandboxes are in the process that made them.
var newInproc = func(cfg inproc.Config) (sandbox.Driver, error) { return inproc.New(cfg) }

// writeKernel puts the embedded kernel and what it finds beside itself into a directory.
func writeKernel(dir string) error {
	for _, name := range []string{"kernel.py", "charts.py", "state.py", "node.js", "kernel.java", "kernel.R"} {
		source, err := fs.ReadFile(kernel.Files(), name)
		if err != nil {
			return fmt.Errorf("embedded kernel: %w", err)
		}
		if err := writeFile(filepath.Join(dir, name), source, 0o644); err != nil {
			return err
		}
	}
	return nil
}

package app

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/config"
)

// VerifyTemplates reads every template of the data directory and compares it with what was built.
func VerifyTemplates(ctx context.Context, cfg config.Config) []Finding {
	const name = "templates"
	dir := filepath.Join(cfg.DataDir, "templates")
	switch _, err := os.Stat(dir); {
	case cfg.Driver != config.DriverNative, os.IsNotExist(err):
		return []Finding{{name, "note", "no template is built on this host", ""}}
	case os.Geteuid() != 0:
		return []Finding{{name, "note", "only root can read all files of a template", "sudo cove doctor --verify"}}
	}
	store, err := openTemplates(cfg, NewLogger(cfg.Log, os.Stderr))
	if err != nil {
		return []Finding{{name, LevelRefuse, err.Error(), "correct the definitions in " + dir}}
	}
	var findings []Finding
	good := 0
	for _, t := range store.All() {
		if t.Digest == "" {
			continue // not built
		}
		if err := store.Verify(ctx, t.Tenant, t.Name); err != nil {
			remedy := "sudo cove template build " + t.Name + " --data-dir " + cfg.DataDir
			if t.Tenant != "" {
				remedy = "its tenant removes it and makes it again: it is a snapshot or an image"
			}
			findings = append(findings, Finding{name, LevelRefuse, err.Error(), remedy})
			continue
		}
		good++
	}
	return append(findings, Finding{name, "ok", fmt.Sprintf("the files of %d templates are those that were built", good), ""})
}

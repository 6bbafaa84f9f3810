package app_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
)

func TestTheAdminsKeyCanBeTheOperators(t *testing.T) {
	cfg := testConfig(t)
	cfg.Auth.AdminKeyFile = filepath.Join(t.TempDir(), "admin-key")
	if _, err := app.Start(t.Context(), cfg, quiet, func(string) {}); err == nil || !strings.Contains(err.Error(), "auth.admin_key_file") {
		t.Fatalf("started without the file: %v", err)
	}
	key := "e2b_" + strings.Repeat("5c", 20)
	if err := os.WriteFile(cfg.Auth.AdminKeyFile, []byte(key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if string(s.Key) != key || s.NewKey {
		t.Error("the server made a key of its own")
	}
	if local, err := app.LocalKey(cfg.DataDir); local != key || err != nil {
		t.Errorf("commands on this machine find %q, %v", local, err)
	}
}

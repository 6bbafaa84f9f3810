package app

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/template"
)

// TestSpoilt_WithoutRoot has the maker tell of a spoilt template to a server that root did not
// start: /readyz and the log say so, and no sandbox starts from it until root has built it again.
func TestSpoilt_WithoutRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
	dir := t.TempDir()
	definition := "name = 'own'\n[files]\n'/etc/own' = 'whole'\n"
	if err := os.WriteFile(filepath.Join(dir, "own.toml"), []byte(definition), 0o644); err != nil {
		t.Fatal(err)
	}
	open := func() *template.Store {
		t.Helper()
		store, err := template.Open(template.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
	spoilt, err := open().Ensure(t.Context(), "own", nil)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	s := &Server{log: slog.New(slog.NewTextHandler(&log, nil))}
	told := map[string]string{}
	built := builtTemplates{open(), &templateState{}}
	p := parts{templates: built, ready: func(context.Context) error { return nil }, spoilt: func() map[string]string { return told }}
	ready := s.withSpoilt(p)

	told["own"] = "of an earlier build"
	if err := ready(t.Context()); err != nil || built.check(t.Context()) != nil {
		t.Errorf("a digest that the template had before: %v, %v", err, built.check(t.Context()))
	}
	told["own"] = spoilt.Digest
	for range 2 {
		if err := ready(t.Context()); err != nil {
			t.Error(err)
		}
	}
	const want = "template own is damaged and could not be built again"
	if err := built.check(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("/readyz is told: %v", err)
	}
	if _, err := built.Resolve(t.Context(), "acme", "own"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a create is told: %v", err)
	}
	if n := strings.Count(log.String(), "sudo cove template build own --rebuild --data-dir "); n != 1 {
		t.Errorf("the log says %d times what to run: %s", n, log.String())
	}

	// Its layers are as they were built, so Repair, which is cove template build, keeps the digest.
	if same, err := open().Repair(t.Context(), "own", nil); err != nil || same.Digest != spoilt.Digest {
		t.Fatalf("Repair: %v, %v", same, err)
	}
	if _, err := built.Resolve(t.Context(), "acme", "own"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a create after Repair: %v", err)
	}
	if _, err := open().Rebuild(t.Context(), "own", nil); err != nil { // cove template build --rebuild
		t.Fatal(err)
	}
	if err := ready(t.Context()); err != nil || built.check(t.Context()) != nil {
		t.Errorf("after root has built it: %v, %v", err, built.check(t.Context()))
	}
	if _, err := built.Resolve(t.Context(), "acme", "own"); err != nil {
		t.Errorf("a create after root has built it: %v", err)
	}
}

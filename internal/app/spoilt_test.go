package app

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// ownTemplate defines a template "own" and gives a way to open its store.
func ownTemplate(t *testing.T) (open func() *template.Store) {
	t.Helper()
	dir := t.TempDir()
	definition := "name = 'own'\n[files]\n'/etc/own' = 'whole'\n"
	if err := os.WriteFile(filepath.Join(dir, "own.toml"), []byte(definition), 0o644); err != nil {
		t.Fatal(err)
	}
	return func() *template.Store {
		t.Helper()
		store, err := template.Open(template.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
}

// TestSpoilt_WithoutRoot has the maker tell of a spoilt template to a server that root did not
// start: /readyz and the log say so, and no sandbox starts from it until root has built it again.
func TestSpoilt_WithoutRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
	open := ownTemplate(t)
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

// failingDriver makes no template ready.
type failingDriver struct{ err error }

func (d failingDriver) Prepare(context.Context, string, string) error { return d.err }

// TestRenewal_BuiltAgainDoesNotWork has a template fail after the renewal has built it.
func TestRenewal_BuiltAgainDoesNotWork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
	open := ownTemplate(t)
	if _, err := open().Ensure(t.Context(), "own", nil); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	s := &Server{log: slog.New(slog.NewTextHandler(&log, nil)), ready: func(context.Context) error { return nil }}
	built := builtTemplates{open(), &templateState{}}
	afterBuild := func(err error) {
		t.Helper()
		s.renewal = &renewal{built: make(chan string, 1), state: built.state, log: s.log}
		built.state.hear(renewed{"own", renewBuilt, ""})
		s.renewal.built <- "own"
		close(s.renewal.built)
		s.prepareRenewed(t.Context(), failingDriver{err}, built, []string{"own"})
	}
	refused := func() error {
		_, err := built.Resolve(t.Context(), "acme", "own")
		return err
	}

	afterBuild(errors.New("the driver is gone"))
	if err := refused(); err != nil {
		t.Errorf("the driver failed, not the template: %v", err)
	}

	afterBuild(fault.New(fault.Unavailable, "its kernel does not start"))
	if err := refused(); err == nil || !strings.Contains(err.Error(), "could not be built again") {
		t.Errorf("it does not work, and a create is told: %v", err)
	}
	if !strings.Contains(log.String(), "sudo cove template build own --rebuild") {
		t.Errorf("the log does not say what to run: %s", &log)
	}
	second, err := open().Rebuild(t.Context(), "own", nil) // cove template build --rebuild
	if err != nil {
		t.Fatal(err)
	}
	if err := refused(); err != nil || built.check(t.Context()) != nil {
		t.Errorf("after root has built it: %v, %v", err, built.check(t.Context()))
	}

	// The maker's report on what root has built is news, and has the renewal build it.
	orders := &orderPipe{}
	s.renewal.stdin = orders
	s.repairSpoilt(parts{templates: built, spoilt: func() map[string]string { return map[string]string{"own": second.Digest} }})
	if refused() == nil || orders.String() != "rebuild own\n" {
		t.Errorf("after the maker's report: %v, and the renewal is told %q", refused(), orders)
	}
}

// orderPipe keeps what the server tells the renewal.
type orderPipe struct{ bytes.Buffer }

func (*orderPipe) Close() error { return nil }

// TestRenewal_LogOfABuild has the child build a template that is damaged, and one that is outdated.
func TestRenewal_LogOfABuild(t *testing.T) {
	for _, c := range []struct {
		name, lines string
		serves      bool
	}{
		{"outdated", `{"template":"x","state":"building"}`, true},
		{"damaged", `{"template":"x","state":"damaged"}` + "\n" + `{"template":"x","state":"building"}`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			r := &renewal{
				lines: io.NopCloser(strings.NewReader(c.lines)), checked: make(chan struct{}), built: make(chan string), done: make(chan struct{}),
				state: &templateState{}, log: slog.New(slog.NewTextHandler(&log, nil)),
			}
			r.follow()
			if serves := strings.Contains(log.String(), "the earlier one serves"); serves != c.serves {
				t.Errorf("the log says that the earlier one serves: %v, want %v: %s", serves, c.serves, &log)
			}
		})
	}
}

// TestRenewal_CurrentIsNoRepair has the child find a template up to date that the server has just
// found not to work.
func TestRenewal_CurrentIsNoRepair(t *testing.T) {
	var s templateState
	s.damage("x", "old")
	s.hear(renewed{"x", renewCurrent, ""})
	if s.usable("x") == nil {
		t.Error("sandboxes start from a template that does not work")
	}
	s.hear(renewed{"x", renewBuilt, "new"})
	if err := s.usable("x"); err != nil {
		t.Errorf("after it was built: %v", err)
	}
}

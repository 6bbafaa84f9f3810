package app

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/template"
)

// parts is a driver with what belongs to it.
type parts struct {
	driver        sandbox.Driver
	templates     templates
	dropPrivilege bool         // once templates are built, this process needs none
	close         func() error // lets go of the driver
	ready         func(context.Context) error
	spoilt        func() map[string]string                       // templates whose layers have changed: digests by name; nil: none is known
	disk          *diskNote                                      // nil: sandboxes have no disk here
	stats         func(context.Context) (telemetry.Maker, error) // nil: there is no maker
	most          template.Limits                                // what the host itself has; zero fields: unknown
	lost          sandbox.Ended                                  // what became of a sandbox that the driver knows nothing of; zero: the host says it
}

// templates is what a sandbox can start from, and a way to make it so.
type templates interface {
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
	List(tenant string) []template.Info
	ensure(ctx context.Context, name string, progress Progress) error
}

func openDriver(ctx context.Context, cfg config.Config, documents documents, log *slog.Logger) (parts, error) {
	switch cfg.Driver {
	case config.DriverNative:
		return openNative(ctx, cfg, log)
	case config.DriverInproc:
		return openInproc(cfg, log)
	case config.DriverKubernetes:
		return openKubernetes(ctx, cfg, documents, log)
	}
	return parts{}, fmt.Errorf("unknown driver %q", cfg.Driver)
}

// builtTemplates are those that a Store builds on this host.
type builtTemplates struct {
	*template.Store
	state *templateState
}

func openTemplates(cfg config.Config, log *slog.Logger) (builtTemplates, error) {
	s, err := template.Open(template.Options{Dir: filepath.Join(cfg.DataDir, "templates"), Log: log})
	return builtTemplates{s, &templateState{}}, err
}

func (t builtTemplates) Resolve(ctx context.Context, tenant, name string) (*template.Template, error) {
	t.refresh()
	if err := t.state.usable(name); err != nil {
		return nil, err
	}
	found, err := t.ResolveFor(ctx, tenant, name)
	if err == nil && found.Snapshot != nil {
		err = t.state.usable(found.Snapshot.Base)
	}
	return found, err
}

// refresh reads the templates again that another process, such as cove template build, has built.
func (t builtTemplates) refresh() {
	t.Current()
	t.state.refresh(t.digest)
}

// digest is that of a built template of the operator; empty if there is none.
func (t builtTemplates) digest(name string) string {
	found, err := t.Store.Resolve(context.Background(), name) // from memory
	if err != nil {
		return ""
	}
	return found.Digest
}

// check fails while a template is damaged.
func (t builtTemplates) check(ctx context.Context) error {
	t.refresh()
	return t.state.check(ctx)
}

// usable tells whether sandboxes may start from a template of the operator.
func (p parts) usable(name string) bool {
	built, ok := p.templates.(builtTemplates)
	return !ok || built.state.usable(name) == nil
}

func (t builtTemplates) List(tenant string) []template.Info {
	t.Current()
	return t.ListFor(tenant)
}

// ensure builds a template that is not there. One that is built serves as it is, also when the host has changed since:
// building takes minutes, and renewTemplates does it behind the server.
func (t builtTemplates) ensure(ctx context.Context, name string, progress Progress) error {
	if _, err := t.Store.Resolve(ctx, name); err == nil {
		return nil
	}
	var last string
	_, err := t.Ensure(ctx, name, func(p template.Progress) {
		line := "template " + name + ": " + p.Step + bar(p.Done, p.Total)
		if p.Message != "" {
			line += ": " + p.Message
		}
		if line != last { // a line per thing, not per byte
			progress(line)
			last = line
		}
	})
	return err
}

// bar shows how far a step is that counts what it does.
func bar(done, total int64) string {
	const width = 20
	if total <= 0 {
		return ""
	}
	full := int(min(done, total) * width / total)
	return fmt.Sprintf(" [%s%s] %d/%d", strings.Repeat("#", full), strings.Repeat(".", width-full), done, total)
}

// hostTemplates are this host as it is, for a driver that isolates nothing.
type hostTemplates map[string]*template.Template

func newHostTemplates() hostTemplates {
	base := template.Template{Name: "base", Digest: "host", User: "user", Trees: []template.Tree{{Target: "/", Lower: []string{"/"}}}}
	python := base
	python.Name = "python"
	if name, err := exec.LookPath("python3"); err == nil {
		python.Python = template.Python{Executable: name}
	}
	interpreter := python
	interpreter.Name = codeInterpreter
	return hostTemplates{"base": &base, "python": &python, codeInterpreter: &interpreter}
}

func (t hostTemplates) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	if found := t[name]; found != nil {
		return found, nil
	}
	return nil, fault.New(fault.NotFound, "there is no template %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(t)), ", "))
}

func (t hostTemplates) List(string) []template.Info {
	var all []template.Info
	for _, name := range slices.Sorted(maps.Keys(t)) {
		all = append(all, template.Info{Name: name, Digest: t[name].Digest, Source: template.SourceBuiltIn + " host"})
	}
	return all
}

func (t hostTemplates) ensure(ctx context.Context, name string, _ Progress) error {
	_, err := t.Resolve(ctx, Tenant, name)
	return err
}

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/template"
)

// openDomain opens driver, templates and Manager, and gives up privilege as soon as nothing here needs it.
func (s *Server) openDomain(ctx context.Context, store *sqlstore.Store, progress Progress) (*sandbox.Manager, parts, *telemetry.Observer, error) {
	s.startup.Say("the " + s.cfg.Driver + " driver is starting")
	p, err := openDriver(ctx, s.cfg, store, s.log)
	if err != nil {
		return nil, parts{}, nil, fmt.Errorf("open the %s driver: %w", s.cfg.Driver, err)
	}
	s.undo.add("close driver", p.close)
	s.ready = p.ready
	sandboxes := sandboxConfig(s.cfg, p.most)
	if sandboxes.Networks, err = networkRules(s.cfg); err != nil {
		return nil, parts{}, nil, fmt.Errorf("configuration: %w", err)
	}
	sandboxes.Lost, sandboxes.Server, sandboxes.Space = p.lost, s.team.me(), s.spaceCheck()
	if err := sandboxes.Validate(); err != nil {
		return nil, parts{}, nil, fmt.Errorf("configuration: %w", err)
	}
	names := prepared(s.cfg)
	needed := slices.Compact(append([]string{"base"}, names...))
	for _, name := range needed {
		if err := p.templates.ensure(ctx, name, progress); err != nil {
			return nil, parts{}, nil, fmt.Errorf("build template %s: %w", name, err)
		}
	}
	if built, ok := p.templates.(builtTemplates); ok {
		if err := s.renewTemplates(built, needed); err != nil {
			return nil, parts{}, nil, err
		}
	}
	s.repairSpoilt(p)
	s.ready = s.withSpoilt(p)
	s.startup.Say("the sandboxes of an earlier server are being found")
	if p.dropPrivilege {
		if err := s.dropPrivilege(); err != nil {
			return nil, parts{}, nil, fmt.Errorf("give up privilege: %w", err)
		}
	}
	observer := telemetry.New(s.log)
	manager := sandbox.NewManager(sandboxes, s.tracing.Driver(p.driver), store, p.templates, observer, s.log)
	s.undo.add("close manager", manager.Close)
	if err := manager.Open(ctx); err != nil {
		return nil, parts{}, nil, fmt.Errorf("find the sandboxes of an earlier server: %w", err)
	}
	if s.renewal != nil {
		s.startup.Say("the templates are being checked")
		s.renewal.awaitCheck(ctx)
	}
	progress("warming template " + names[0])
	if err := s.prepare(ctx, manager, p, names[0]); err != nil {
		return nil, parts{}, nil, fmt.Errorf("prepare template %s: %w", names[0], err)
	}
	s.warm(manager, p, names[1:])
	s.followRenewal(manager, names)
	s.watchSpoilt(p)
	s.Caps = manager.Caps()
	observer.Watch(s.sources(manager, p))
	return manager, p, observer, nil
}

// prepare makes a template ready. One that does not work is built again, and does not keep the
// server from serving the others: followRenewal makes it ready then.
func (s *Server) prepare(ctx context.Context, m *sandbox.Manager, p parts, name string) error {
	err := m.Prepare(ctx, Tenant, name)
	if err == nil || !p.usable(name) {
		return nil
	}
	built, ok := p.templates.(builtTemplates)
	if !ok || ctx.Err() != nil || !fault.Is(err, fault.Unavailable) || s.ready(ctx) != nil {
		return err // another cause than the template
	}
	s.repair(built, name, err)
	return nil
}

// warm makes further templates ready while the server serves already: who asks for one before that waits a moment longer.
func (s *Server) warm(m *sandbox.Manager, p parts, names []string) {
	ctx, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, name := range names {
			if err := s.prepare(ctx, m, p, name); err != nil && ctx.Err() == nil {
				s.log.Warn("template is not warm", "template", name, "error", err)
			}
		}
	}()
	s.undo.add("stop warming templates", func() error { cancel(); <-done; return nil })
}

// followRenewal makes each template that is built again ready: the first create from it would else wait for its zygote.
func (s *Server) followRenewal(m *sandbox.Manager, names []string) {
	if s.renewal == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		for name := range s.renewal.built {
			if !slices.Contains(names, name) {
				continue
			}
			if err := m.Prepare(ctx, Tenant, name); err != nil && ctx.Err() == nil {
				s.log.Error("a template that was built again does not work, and no sandbox starts from it", "template", name, "error", err)
				s.renewal.state.hear(renewed{name, renewDamaged, ""})
				s.renewal.state.hear(renewed{name, renewFailed, ""})
			}
		}
	}()
	s.undo.add("stop warming templates that were built again", func() error {
		cancel()
		err := s.renewal.close(s.cfg.Ephemeral)
		<-done
		return err
	})
}

// errChanged is why a template is built again whose layers the maker found changed.
var errChanged = errors.New("its layers were changed after they were built")

// repairSpoilt has the templates built again whose layers the maker found changed.
func (s *Server) repairSpoilt(p parts) {
	built, ok := p.templates.(builtTemplates)
	if !ok || p.spoilt == nil {
		return
	}
	built.refresh()
	for name, digest := range p.spoilt() {
		if built.digest(name) == digest {
			s.repair(built, name, errChanged)
		}
	}
}

// withSpoilt is the driver's check, and repairs what it tells of templates.
func (s *Server) withSpoilt(p parts) func(context.Context) error {
	if p.spoilt == nil {
		return p.ready
	}
	return func(ctx context.Context) error {
		err := p.ready(ctx)
		s.repairSpoilt(p)
		return err
	}
}

// spoiltLook is how often the server asks the maker which templates are spoilt. The maker reads
// their content much less often.
const spoiltLook = time.Minute

// watchSpoilt has templates repaired also if no client asks for readiness.
func (s *Server) watchSpoilt(p parts) {
	if p.spoilt == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(spoiltLook)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = s.ready(ctx) // /readyz and its log say how the maker is
			case <-ctx.Done():
				return
			}
		}
	}()
	s.undo.add("stop asking for spoilt templates", func() error { cancel(); <-done; return nil })
}

// codeInterpreter is the template that images which need no registry are mapped to.
const codeInterpreter = "code-interpreter"

// prepared are the templates that are made ready at the start. A server for one command needs its own alone.
func prepared(cfg config.Config) []string {
	if len(cfg.Template.Prepare) > 0 {
		return cfg.Template.Prepare
	}
	names := []string{defaultTemplate(cfg)}
	if !cfg.Ephemeral && slices.Contains(slices.Collect(maps.Values(cfg.Images.Map)), codeInterpreter) && !slices.Contains(names, codeInterpreter) {
		names = append(names, codeInterpreter)
	}
	return names
}

func defaultTemplate(cfg config.Config) string {
	if cfg.Sandbox.DefaultTemplate != "" {
		return cfg.Sandbox.DefaultTemplate
	}
	return "python"
}

// sandboxConfig refuses by itself what the host does not have; an operator may allow more or less.
func sandboxConfig(cfg config.Config, host template.Limits) sandbox.Config {
	c := cfg.Sandbox
	paused := c.PausedLifetime
	if paused == 0 {
		paused = -1 // for ever, which the domain writes so
	}
	return sandbox.Config{
		DefaultTemplate: defaultTemplate(cfg), DefaultLifetime: c.DefaultLifetime, MaxLifetime: c.MaxLifetime,
		DefaultIdleTimeout: c.IdleTimeout, PausedLifetime: paused, StartTimeout: c.StartTimeout, Retention: c.Retention,
		MaxPerTenant: c.MaxPerTenant, MaxEnded: c.MaxEnded, CreateRate: c.CreateRate, MaxEventStreams: c.MaxEventStreams, MaxOperations: c.MaxOperations,
		DefaultLimits: template.Limits{CPUs: c.CPUs, MemoryBytes: int64(c.Memory), Pids: c.Pids, DiskBytes: int64(c.Disk), OpenFiles: c.OpenFiles},
		MaxLimits: template.Limits{
			CPUs: cmp.Or(c.MaxCPUs, host.CPUs), MemoryBytes: cmp.Or(int64(c.MaxMemory), host.MemoryBytes), DiskBytes: cmp.Or(int64(c.MaxDisk), host.DiskBytes),
		},
		DefaultNetwork: policy.Network{Mode: policy.Mode(c.Network)},
	}
}

// networkRules is what the operator's configuration says of networks.
func networkRules(cfg config.Config) (policy.Rules, error) {
	private, err := cfg.Network.PrivateNetworks(policy.EveryTenant)
	r := policy.Rules{MaxMode: policy.Mode(cfg.Network.MaxMode), Private: private}
	return r, errors.Join(err, r.Validate())
}

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/covehq/cove/internal/config"
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
	s.followRenewal(manager, p, names)
	s.watchSpoilt(p)
	s.Caps = manager.Caps()
	observer.Watch(s.sources(manager, p))
	return manager, p, observer, nil
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

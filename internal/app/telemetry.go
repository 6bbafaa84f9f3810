package app

import (
	"cmp"
	"context"
	"log/slog"
	"os"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/telemetry"
)

func version() string { return cmp.Or(Version, "dev") }

// openTracing is the first step, so that its undo is the last: by then everything that makes spans has stopped.
func (s *Server) openTracing(ctx context.Context) error {
	t, err := telemetry.OpenTracing(ctx, version(), os.Stdout, s.log)
	if err != nil || t == nil {
		return err
	}
	s.tracing = t
	s.undo.add("flush traces", t.Close)
	s.log = slog.New(t.LogHandler(s.log.Handler()))
	return nil
}

// traced is the Manager as dialects see it.
func (s *Server) traced(m *sandbox.Manager) domain {
	if s.tracing == nil {
		return telemetry.Passing{Manager: m}
	}
	return s.tracing.Manager(m, s.cfg.Telemetry.CaptureOutput)
}

// tracedArtifacts is the Keeper as sessions see it.
func (s *Server) tracedArtifacts(k *artifact.Keeper) session.Artifacts {
	if s.tracing == nil {
		return k
	}
	return s.tracing.Artifacts(k)
}

// tracedSessions is what the API sees, tracedDatasets what is behind that.
func (s *Server) tracedSessions(m *session.Manager) cove.Sessions {
	if s.tracing == nil {
		return m
	}
	return s.tracing.Sessions(m)
}

func (s *Server) tracedDatasets(d *dataset.Store) session.Staging {
	if s.tracing == nil {
		return d
	}
	return s.tracing.Datasets(d)
}

// pushMetrics sends metrics where the standard variables say, once all parts that are counted are there.
func (s *Server) pushMetrics(ctx context.Context, o *telemetry.Observer) error {
	p, err := telemetry.OpenPush(ctx, o, version(), os.Stdout, s.log)
	if err != nil || p == nil {
		return err
	}
	s.undo.add("flush metrics", p.Close)
	return nil
}

// sources are what metrics ask when somebody looks.
func (s *Server) sources(m *sandbox.Manager, p parts) telemetry.Sources {
	return telemetry.Sources{
		Version: version(), Driver: s.Caps.Name, Census: m.Census, Maker: p.stats,
		Shared: func(name string) bool {
			// From memory, for nobody's tenant, so there is nothing to stop: what is found is everybody's.
			_, err := p.templates.Resolve(context.Background(), "", name)
			return !fault.Is(err, fault.NotFound)
		},
		DiskFree: func() (int64, bool) { return diskFree(s.cfg.DataDir) },
	}
}

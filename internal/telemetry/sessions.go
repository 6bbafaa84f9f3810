package telemetry

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
)

// What sessions add to spans: counts and keys, never the names of files.
const (
	keyKept     = attribute.Key("cove.artifacts.kept")
	keyRejected = attribute.Key("cove.artifacts.rejected")
	keyBytes    = attribute.Key("cove.bytes")
)

// Sessions is a session.Manager that shows in traces when sessions are opened. Their runs are the Manager's.
type Sessions struct {
	*session.Manager
	tracer trace.Tracer
}

// Sessions wraps m.
func (t *Tracing) Sessions(m *session.Manager) *Sessions { return &Sessions{m, t.tracer} }

// Ensure is session.open.
func (s *Sessions) Ensure(ctx context.Context, p auth.Principal, key string, req session.Request) (session.Session, bool, error) {
	ctx, span := s.tracer.Start(ctx, "session.open", trace.WithAttributes(keyTenant.String(p.Tenant)))
	defer span.End()
	found, created, err := s.Manager.Ensure(ctx, p, key, req)
	fail(span, err)
	if err == nil { // what was refused may not be a key at all
		span.SetAttributes(keySession.String(found.Key), keyCreated.Bool(created))
	}
	return found, created, err
}

// Artifacts is what keeps the files of runs, shown in traces.
type Artifacts struct {
	*artifact.Keeper
	tracer trace.Tracer
}

// Artifacts wraps k.
func (t *Tracing) Artifacts(k *artifact.Keeper) *Artifacts { return &Artifacts{k, t.tracer} }

func (a *Artifacts) start(ctx context.Context, tenant string, o artifact.Origin) (context.Context, trace.Span) {
	ctx, span := a.tracer.Start(ctx, "sandbox.artifact.ingest", trace.WithAttributes(keyTenant.String(tenant)))
	if o.Sandbox != "" {
		span.SetAttributes(keyID.String(o.Sandbox), keySandbox.String(o.Sandbox))
	}
	if o.Key != "" {
		span.SetAttributes(keySession.String(o.Key))
	}
	return ctx, span
}

// Collect is sandbox.artifact.ingest.
func (a *Artifacts) Collect(ctx context.Context, from *agentapi.Client, tenant string, o artifact.Origin, box artifact.Box) ([]artifact.Artifact, error) {
	ctx, span := a.start(ctx, tenant, o)
	defer span.End()
	list, err := a.Keeper.Collect(ctx, from, tenant, o, box)
	failQuietly(span, err)
	count(span, list)
	return list, err
}

// Keep is sandbox.artifact.ingest of one file.
func (a *Artifacts) Keep(ctx context.Context, from *agentapi.Client, tenant string, o artifact.Origin, path string) (artifact.Artifact, error) {
	ctx, span := a.start(ctx, tenant, o)
	defer span.End()
	kept, err := a.Keeper.Keep(ctx, from, tenant, o, path)
	failQuietly(span, err)
	if err == nil {
		count(span, []artifact.Artifact{kept})
	}
	return kept, err
}

// failQuietly gives a span the kind of a fault: its sentence may name a file.
func failQuietly(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, "")
		span.SetAttributes(keyFault.String(string(fault.KindOf(err))))
	}
}

func count(span trace.Span, list []artifact.Artifact) {
	var kept, rejected int
	var bytes int64
	for i := range list {
		if list[i].Error != "" {
			rejected++
			continue
		}
		kept++
		bytes += list[i].Size
	}
	span.SetAttributes(keyKept.Int(kept), keyRejected.Int(rejected), keyBytes.Int64(bytes))
}

// Datasets is what keeps data for sessions, shown in traces.
type Datasets struct {
	*dataset.Store
	tracer trace.Tracer
}

// Datasets wraps s.
func (t *Tracing) Datasets(s *dataset.Store) *Datasets { return &Datasets{s, t.tracer} }

// Stage is sandbox.dataset.stage.
func (d *Datasets) Stage(ctx context.Context, tenant, of string, up dataset.Upload, find dataset.Finder) (dataset.Dataset, error) {
	ctx, span := d.tracer.Start(ctx, "sandbox.dataset.stage", trace.WithAttributes(keyTenant.String(tenant)))
	defer span.End()
	staged, err := d.Store.Stage(ctx, tenant, of, up, find)
	failQuietly(span, err)
	if err == nil {
		span.SetAttributes(keyBytes.Int64(staged.Size))
	}
	return staged, err
}

package telemetry

import (
	"context"

	"go.opentelemetry.io/otel/trace"

	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Driver shows in traces what the driver does for a caller; what nobody asked for, such as an end by the clock, is no
// part of a trace.
func (t *Tracing) Driver(d sandbox.Driver) sandbox.Driver {
	if t == nil {
		return d
	}
	return tracedDriver{d, t.tracer}
}

type tracedDriver struct {
	sandbox.Driver
	tracer trace.Tracer
}

// Unwrap is for those who ask whether a driver can do more than the contract.
func (d tracedDriver) Unwrap() sandbox.Driver { return d.Driver }

// within makes a span around work that belongs to one.
func (d tracedDriver) within(ctx context.Context, name, id string, work func(context.Context) error) error {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return work(ctx)
	}
	ctx, span := d.tracer.Start(ctx, name, trace.WithAttributes(keySandbox.String(id)))
	defer span.End()
	err := work(ctx)
	fail(span, err)
	return err
}

func (d tracedDriver) Start(ctx context.Context, req sandbox.StartRequest) error {
	return d.within(ctx, "driver.start", req.ID, func(ctx context.Context) error { return d.Driver.Start(ctx, req) })
}

func (d tracedDriver) Fork(ctx context.Context, req sandbox.ForkRequest) (forked sandbox.Forked, err error) {
	err = d.within(ctx, "driver.fork", req.Parent, func(ctx context.Context) error {
		forked, err = d.Driver.Fork(ctx, req)
		return err
	})
	return forked, err
}

func (d tracedDriver) Pause(ctx context.Context, id string) error {
	return d.within(ctx, "driver.pause", id, func(ctx context.Context) error { return d.Driver.Pause(ctx, id) })
}

func (d tracedDriver) Resume(ctx context.Context, id string) error {
	return d.within(ctx, "driver.resume", id, func(ctx context.Context) error { return d.Driver.Resume(ctx, id) })
}

func (d tracedDriver) Snapshot(ctx context.Context, req sandbox.SnapshotRequest) (t *template.Template, err error) {
	err = d.within(ctx, "driver.snapshot", req.ID, func(ctx context.Context) error {
		t, err = d.Driver.Snapshot(ctx, req)
		return err
	})
	return t, err
}

func (d tracedDriver) Kernel(ctx context.Context, id, kernel string) error {
	return d.within(ctx, "driver.kernel", id, func(ctx context.Context) error { return d.Driver.Kernel(ctx, id, kernel) })
}

func (d tracedDriver) Stop(ctx context.Context, id string, cause sandbox.Cause) error {
	return d.within(ctx, "driver.stop", id, func(ctx context.Context) error { return d.Driver.Stop(ctx, id, cause) })
}

package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdoutmetric"
	"go.opentelemetry.io/otel/sdk/instrumentation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// Push sends the metrics of an Observer away again and again. A nil one sends nothing.
type Push struct{ provider *sdkmetric.MeterProvider }

// OpenPush does what the standard OTEL_* variables say; it returns nil when they ask for no metrics. What is sent is what
// /metrics shows, under the same names. It is called when o has all its sources. Close it.
func OpenPush(ctx context.Context, o *Observer, version string, console io.Writer, log *slog.Logger) (*Push, error) {
	name := metrics.exporter(log)
	if name == exporterNone {
		return nil, nil
	}
	hearComplaints(log)
	exporter, err := newMetricExporter(ctx, name, console, log)
	if err != nil {
		return nil, fmt.Errorf("metric exporter: %w", err)
	}
	described, err := describe(ctx, version)
	if err != nil {
		return nil, errors.Join(err, exporter.Shutdown(ctx))
	}
	// The interval and the timeout come from the environment.
	reader := sdkmetric.NewPeriodicReader(exporter, sdkmetric.WithProducer(producer{o, version}))
	return &Push{sdkmetric.NewMeterProvider(sdkmetric.WithResource(described), sdkmetric.WithReader(reader))}, nil
}

func newMetricExporter(ctx context.Context, name string, console io.Writer, log *slog.Logger) (sdkmetric.Exporter, error) {
	if name == exporterConsole {
		return stdoutmetric.New(stdoutmetric.WithWriter(console))
	}
	if err := metrics.checkEndpoint(); err != nil {
		return nil, err
	}
	if metrics.protocol(log) == protocolGRPC {
		return otlpmetricgrpc.New(ctx)
	}
	return otlpmetrichttp.New(ctx)
}

// Close sends what is left.
func (p *Push) Close() error {
	if p == nil {
		return nil
	}
	return flush(p.provider.Shutdown)
}

// producer reads the same families that Prometheus does, so that there is one count of everything.
type producer struct {
	o       *Observer
	version string
}

func (p producer) Produce(context.Context) ([]metricdata.ScopeMetrics, error) {
	all := metricdata.ScopeMetrics{Scope: instrumentation.Scope{Name: scope, Version: p.version}}
	now := time.Now()
	for _, f := range p.o.list {
		all.Metrics = append(all.Metrics, f.data(now)...)
	}
	return []metricdata.ScopeMetrics{all}, nil
}

// attributes are a series' labels.
func (d *desc) attributes(values labels) attribute.Set {
	list := make([]attribute.KeyValue, len(d.labels))
	for i, name := range d.labels {
		list[i] = attribute.String(name, values[i])
	}
	return attribute.NewSet(list...)
}

func (d *desc) metric(data metricdata.Aggregation) metricdata.Metrics {
	return metricdata.Metrics{Name: d.name, Description: d.help, Data: data}
}

func (c *counter) data(now time.Time) []metricdata.Metrics {
	sum := metricdata.Sum[int64]{Temporality: metricdata.CumulativeTemporality, IsMonotonic: true}
	for l, n := range c.now() {
		sum.DataPoints = append(sum.DataPoints, metricdata.DataPoint[int64]{Attributes: c.attributes(l), StartTime: begun, Time: now, Value: int64(n)})
	}
	if len(sum.DataPoints) == 0 {
		return nil
	}
	return []metricdata.Metrics{c.metric(sum)}
}

func (g *gauges) data(now time.Time) (all []metricdata.Metrics) {
	values := g.now()
	for i := range g.list {
		d := &g.list[i]
		var points []metricdata.DataPoint[float64]
		for l, v := range values[d.name] {
			points = append(points, metricdata.DataPoint[float64]{Attributes: d.attributes(l), StartTime: begun, Time: now, Value: v})
		}
		switch {
		case len(points) == 0:
		case d.kind == typeCounter:
			all = append(all, d.metric(metricdata.Sum[float64]{DataPoints: points, Temporality: metricdata.CumulativeTemporality, IsMonotonic: true}))
		default:
			all = append(all, d.metric(metricdata.Gauge[float64]{DataPoints: points}))
		}
	}
	return all
}

func (h *histogram) data(now time.Time) []metricdata.Metrics {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := metricdata.Histogram[float64]{Temporality: metricdata.CumulativeTemporality}
	for l, d := range h.values {
		point := metricdata.HistogramDataPoint[float64]{
			Attributes: h.attributes(l), StartTime: begun, Time: now, Bounds: h.bounds, BucketCounts: slices.Clone(d.counts), Sum: d.sum,
		}
		for _, n := range d.counts {
			point.Count += n
		}
		all.DataPoints = append(all.DataPoints, point)
	}
	if len(all.DataPoints) == 0 {
		return nil
	}
	return []metricdata.Metrics{h.metric(all)}
}

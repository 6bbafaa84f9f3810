package otlptest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	metriccollector "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	metrics "go.opentelemetry.io/proto/otlp/metrics/v1"
)

// Metric is one metric as it came last.
type Metric struct {
	Type        string // as Prometheus calls it: counter, gauge, histogram
	Description string
	Resource    map[string]any
	Series      map[string]float64 // by labels as Prometheus writes them, `{kind="cell"}`; a histogram's is its count
	Sums        map[string]float64 // of a histogram
	Buckets     map[string][]uint64
	Bounds      []float64
}

type metricService struct {
	metriccollector.UnimplementedMetricsServiceServer
	c *Collector
}

func (s metricService) Export(ctx context.Context, req *metriccollector.ExportMetricsServiceRequest) (*metriccollector.ExportMetricsServiceResponse, error) {
	s.c.take(req, headerOf(ctx))
	return &metriccollector.ExportMetricsServiceResponse{}, nil
}

func (c *Collector) takeMetrics(req *metriccollector.ExportMetricsServiceRequest) {
	for _, rm := range req.ResourceMetrics {
		for _, sm := range rm.ScopeMetrics {
			for _, m := range sm.Metrics {
				metric := metricOf(m)
				metric.Resource = attributes(rm.Resource.GetAttributes())
				c.metrics[m.Name] = metric
			}
		}
	}
}

func metricOf(m *metrics.Metric) Metric {
	out := Metric{Description: m.Description, Series: map[string]float64{}, Sums: map[string]float64{}, Buckets: map[string][]uint64{}}
	switch data := m.Data.(type) {
	case *metrics.Metric_Gauge:
		out.Type = "gauge"
		out.numbers(data.Gauge.DataPoints)
	case *metrics.Metric_Sum:
		out.Type = "updowncounter"
		if data.Sum.IsMonotonic && data.Sum.AggregationTemporality == metrics.AggregationTemporality_AGGREGATION_TEMPORALITY_CUMULATIVE {
			out.Type = "counter"
		}
		out.numbers(data.Sum.DataPoints)
	case *metrics.Metric_Histogram:
		out.Type = "histogram"
		for _, p := range data.Histogram.DataPoints {
			key := labels(p.Attributes)
			out.Series[key], out.Sums[key], out.Buckets[key], out.Bounds = float64(p.Count), p.GetSum(), p.BucketCounts, p.ExplicitBounds
		}
	}
	return out
}

func (m *Metric) numbers(points []*metrics.NumberDataPoint) {
	for _, p := range points {
		switch v := p.Value.(type) {
		case *metrics.NumberDataPoint_AsInt:
			m.Series[labels(p.Attributes)] = float64(v.AsInt)
		case *metrics.NumberDataPoint_AsDouble:
			m.Series[labels(p.Attributes)] = v.AsDouble
		}
	}
}

// labels are in the order of their names.
func labels(list []*common.KeyValue) string {
	all := attributes(list)
	if len(all) == 0 {
		return ""
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		parts = append(parts, fmt.Sprintf("%s=%q", name, all[name]))
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// Metrics are those that came, by name.
func (c *Collector) Metrics() map[string]Metric {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.metrics)
}

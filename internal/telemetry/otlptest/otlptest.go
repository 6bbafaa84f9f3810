// Package otlptest is a double of an OpenTelemetry collector for tests: it takes spans and metrics over HTTP and gRPC and
// keeps them. It forwards nothing and forgives nothing.
package otlptest

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	metriccollector "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	traces "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // what an exporter may be told to use
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// Collector is where an exporter can send to.
type Collector struct {
	HTTP string // endpoint of http/protobuf
	GRPC string // endpoint of grpc

	mu      sync.Mutex
	spans   []Span
	metrics map[string]Metric
	raw     bytes.Buffer
	headers []http.Header
	arrived chan struct{} // closed and replaced when something comes
}

// Span is one span as it came.
type Span struct {
	Name, Kind            string
	Trace, ID, Parent     string // hex; an empty Parent is none
	State                 string // tracestate
	Attributes            map[string]any
	Resource              map[string]any
	Failed, OK            bool   // by its status; neither: it has none
	Description           string // of its status
	Events, Links         int
	Begun, Ended          time.Time
	InstrumentationScope  string
	DroppedAttributeCount uint32
}

// Start listens on loopback until the test ends.
func Start(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{metrics: map[string]Metric{}, arrived: make(chan struct{})}
	var serving sync.WaitGroup

	web, rpc := &http.Server{Handler: http.HandlerFunc(c.post)}, grpc.NewServer()
	collector.RegisterTraceServiceServer(rpc, service{c: c})
	metriccollector.RegisterMetricsServiceServer(rpc, metricService{c: c})
	forWeb, forRPC := listen(t), listen(t)
	c.HTTP, c.GRPC = "http://"+forWeb.Addr().String(), "http://"+forRPC.Addr().String()
	serving.Go(func() { _ = web.Serve(forWeb) })
	serving.Go(func() { _ = rpc.Serve(forRPC) })

	t.Cleanup(func() {
		web.Close()
		rpc.Stop()
		serving.Wait()
	})
	return c
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (c *Collector) post(w http.ResponseWriter, r *http.Request) {
	var req proto.Message
	switch r.URL.Path {
	case "/v1/traces":
		req = &collector.ExportTraceServiceRequest{}
	case "/v1/metrics":
		req = &metriccollector.ExportMetricsServiceRequest{}
	}
	if req == nil || r.Header.Get("Content-Type") != "application/x-protobuf" {
		http.Error(w, "traces and metrics as protobuf, at /v1/traces and /v1/metrics", http.StatusNotFound)
		return
	}
	text, err := content(r)
	if err == nil {
		err = proto.Unmarshal(text, req)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.take(req, r.Header)
	w.Header().Set("Content-Type", "application/x-protobuf") // an empty body is an empty answer
}

func content(r *http.Request) ([]byte, error) {
	if r.Header.Get("Content-Encoding") != "gzip" {
		return io.ReadAll(r.Body)
	}
	z, err := gzip.NewReader(r.Body)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}

type service struct {
	collector.UnimplementedTraceServiceServer
	c *Collector
}

func (s service) Export(ctx context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.c.take(req, headerOf(ctx))
	return &collector.ExportTraceServiceResponse{}, nil
}

func headerOf(ctx context.Context) http.Header {
	header := http.Header{}
	md, _ := metadata.FromIncomingContext(ctx)
	for name, values := range md {
		header[http.CanonicalHeaderKey(name)] = values
	}
	return header
}

func (c *Collector) take(req proto.Message, header http.Header) {
	text, err := proto.Marshal(req)
	if err != nil {
		panic(err) // it was read a moment ago
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.Write(text)
	c.headers = append(c.headers, header)
	switch req := req.(type) {
	case *collector.ExportTraceServiceRequest:
		c.takeSpans(req)
	case *metriccollector.ExportMetricsServiceRequest:
		c.takeMetrics(req)
	}
	close(c.arrived)
	c.arrived = make(chan struct{})
}

func (c *Collector) takeSpans(req *collector.ExportTraceServiceRequest) {
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				span := spanOf(s)
				span.Resource, span.InstrumentationScope = attributes(rs.Resource.GetAttributes()), ss.Scope.GetName()
				c.spans = append(c.spans, span)
			}
		}
	}
}

func spanOf(s *traces.Span) Span {
	return Span{
		Name: s.Name, Kind: s.Kind.String(), Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId),
		Parent: hex.EncodeToString(s.ParentSpanId), State: s.TraceState, Attributes: attributes(s.Attributes),
		Failed: s.Status.GetCode() == traces.Status_STATUS_CODE_ERROR, OK: s.Status.GetCode() == traces.Status_STATUS_CODE_OK, Description: s.Status.GetMessage(),
		Events: len(s.Events), Links: len(s.Links), DroppedAttributeCount: s.DroppedAttributesCount,
		Begun: time.Unix(0, int64(s.StartTimeUnixNano)), Ended: time.Unix(0, int64(s.EndTimeUnixNano)),
	}
}

func attributes(list []*common.KeyValue) map[string]any {
	all := map[string]any{}
	for _, a := range list {
		switch v := a.Value.GetValue().(type) {
		case *common.AnyValue_StringValue:
			all[a.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			all[a.Key] = v.IntValue
		case *common.AnyValue_DoubleValue:
			all[a.Key] = v.DoubleValue
		case *common.AnyValue_BoolValue:
			all[a.Key] = v.BoolValue
		default:
			all[a.Key] = fmt.Sprint(a.Value)
		}
	}
	return all
}

// Spans are all that came so far, the first to begin first.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := slices.Clone(c.spans)
	slices.SortStableFunc(all, func(a, b Span) int { return a.Begun.Compare(b.Begun) })
	return all
}

// Raw is every byte that came, for a test that something did not.
func (c *Collector) Raw() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.raw.Bytes())
}

// Headers are those of every request that brought something.
func (c *Collector) Headers() []http.Header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.headers)
}

// Named are the spans of one name.
func (c *Collector) Named(name string) []Span {
	return slices.DeleteFunc(c.Spans(), func(s Span) bool { return s.Name != name })
}

// One is the only span of a name; it waits until there is one.
func (c *Collector) One(t testing.TB, name string) Span {
	t.Helper()
	c.Await(t, name, func() bool { return len(c.Named(name)) > 0 })
	all := c.Named(name)
	if len(all) != 1 {
		t.Fatalf("%d spans are called %s: %+v", len(all), name, all)
	}
	return all[0]
}

// patience is for a machine that has much to do; what comes is seen at once.
const patience = 30 * time.Second

// Await returns when what the test waits for has come.
func (c *Collector) Await(t testing.TB, what string, there func() bool) {
	t.Helper()
	late := time.After(patience)
	for {
		c.mu.Lock()
		arrived := c.arrived
		c.mu.Unlock()
		if there() {
			return
		}
		select {
		case <-arrived:
		case <-late:
			t.Fatalf("no %s after %v; there are %+v", what, patience, c.Spans())
		}
	}
}

// Package envd answers for a sandbox's port 49983 as E2B's daemon would from inside: processes and files over Connect,
// and files over plain HTTP. It translates; the agent in the sandbox does the work, and who may come in is the edge's
// business, but for /files, where a signed URL is as good as a token.
package envd

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb/envdpbconnect"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/rpcbudget"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes is what envd asks of the domain.
type Sandboxes interface {
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	// Explain turns the error of a stream that broke into why its sandbox ended.
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
	History(ctx context.Context, p auth.Principal, id string, from, to time.Time) ([]sandbox.Sample, error)
}

// What one Connect message may have, as it comes and unpacked. A few bytes unpack to very many, so that only those have
// more which carry input for a process; clients that send more of it at once are told so and can send it in pieces.
const (
	maxMessage = 1 << 20
	maxInput   = 8 << 20
)

// bound is the limit of one procedure's messages.
func bound(spec connect.Spec) []connect.HandlerOption {
	switch spec.Procedure {
	case envdpbconnect.ProcessSendInputProcedure, envdpbconnect.ProcessStreamInputProcedure:
		return []connect.HandlerOption{connect.WithReadMaxBytes(maxInput)}
	}
	return []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage)}
}

// commandBound says of a command that does not fit into a message what a shorter one that is too long is told. connect's own
// answer is resource_exhausted, which the SDKs take for a limit of requests and try again.
type commandBound struct{}

func (commandBound) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc { return next }

func (commandBound) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (commandBound) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if conn.Spec().Procedure == envdpbconnect.ProcessStartProcedure {
			conn = boundedCommand{conn}
		}
		return next(ctx, conn)
	}
}

type boundedCommand struct{ connect.StreamingHandlerConn }

func (c boundedCommand) Receive(message any) error {
	err := c.StreamingHandlerConn.Receive(message)
	if connect.CodeOf(err) == connect.CodeResourceExhausted && !transfer.OverBudget(err) {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the command is too long: %s, and all of it %d bytes",
			agentapi.ArgumentLimit, maxMessage))
	}
	return err
}

// Handler answers requests that carry a target.
type Handler struct {
	sandboxes Sandboxes
	tokens    target.Tokens
	log       *slog.Logger
	mux       *http.ServeMux
	pollers   *pollers
}

// New makes a handler. Close ends what outlives requests.
func New(s Sandboxes, tokens target.Tokens, log *slog.Logger) *Handler {
	h := &Handler{sandboxes: s, tokens: tokens, log: log, mux: http.NewServeMux(), pollers: newPollers()}
	limits := connect.WithHandlerOptions(connect.WithConditionalHandlerOptions(bound), connect.WithInterceptors(commandBound{}, rpcbudget.Interceptor{}))
	path, rpc := envdpbconnect.NewProcessHandler(&processes{h}, limits)
	h.mux.Handle(path, counted(rpc))
	path, rpc = envdpbconnect.NewFilesystemHandler(&filesystem{h}, limits)
	h.mux.Handle(path, counted(rpc))
	h.mux.HandleFunc("GET /files", h.download)
	h.mux.HandleFunc("POST /files", h.upload)
	h.mux.HandleFunc("POST /files/compose", h.compose)
	h.mux.HandleFunc("GET /health", h.health)
	h.mux.HandleFunc("GET /metrics", h.metrics)
	h.mux.HandleFunc("GET /envs", h.envs)
	h.mux.HandleFunc("POST /init", h.begin)
	h.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		refuse(w, http.StatusNotFound, "there is no "+r.Method+" "+r.URL.Path+" here")
	})
	return h
}

// counted has the owner of the sandbox pay for the messages of rpc.
func counted(rpc http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rpc.ServeHTTP(w, rpcbudget.Request(r, target.From(r.Context()).Who.Tenant))
	})
}

// Close ends the watchers that are asked from time to time; requests end with their server.
func (h *Handler) Close() { h.pollers.close() }

// ServeHTTP answers a request that has come through the edge, which also cuts it when its sandbox stops.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if preflight(w, r) {
		return
	}
	if r.URL.Path == envdpbconnect.ProcessStartProcedure {
		r = takeLifetime(r)
	}
	if r.URL.Path != envdpbconnect.ProcessStreamInputProcedure { // which says nothing for as long as there is no input
		patient, done := transfer.Patient(w, r)
		defer done()
		r = patient
	}
	h.mux.ServeHTTP(&flushing{w}, r)
}

// flushing shows Connect a Flusher: whoever stands in front may have one only by Unwrap.
type flushing struct{ http.ResponseWriter }

func (w *flushing) Flush() {
	_ = http.NewResponseController(w.ResponseWriter).Flush() // a client that has gone is noticed by the next write
}

func (w *flushing) Unwrap() http.ResponseWriter { return w.ResponseWriter }

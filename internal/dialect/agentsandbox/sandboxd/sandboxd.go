// Package sandboxd answers for the two ports of a sandbox on which agent-sandbox's newer runtime listens: files over HTTP, processes
// over gRPC. Nothing runs in the sandbox for it: the agent does the work, as the sandbox's user. Who may come was decided before.
package sandboxd

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb/processpbconnect"
	"github.com/covehq/cove/internal/dialect/rpcbudget"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// home is where processes start and relative paths begin.
const home = "/workspace"

// Domain is what it asks of sandboxes.
type Domain interface {
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	// Explain turns the error of a stream that broke into why its sandbox ended.
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
}

// Handler answers on both ports: their paths do not meet.
type Handler struct {
	sandboxes Domain
	home      string
	rpc       http.Handler
	log       *slog.Logger
}

// maxMessage bounds one message of gRPC, as it comes and unpacked.
const maxMessage = 4 << 20

// New makes a handler.
func New(m Domain, log *slog.Logger) *Handler {
	h := &Handler{sandboxes: m, home: home, log: log}
	_, h.rpc = processpbconnect.NewProcessServiceHandler(&processes{h}, connect.WithReadMaxBytes(maxMessage),
		connect.WithInterceptors(rpcbudget.Interceptor{}))
	return h
}

type visitKey struct{}

// visit is who asks, and for which sandbox.
type visit struct {
	who auth.Principal
	id  string
}

// Serve answers a request for a sandbox.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string) {
	patient, done := transfer.Patient(w, r)
	defer done()
	v := visit{p, id}
	if strings.HasPrefix(r.URL.Path, "/"+processpbconnect.ProcessServiceName+"/") {
		counted := rpcbudget.Request(patient, p.Tenant)
		h.serveRPC(w, counted.WithContext(context.WithValue(counted.Context(), visitKey{}, v)))
		return
	}
	if err := h.route(&call{w: w, r: patient, visit: v}); err != nil {
		h.fail(w, patient, v, err)
	}
}

// serveRPC answers a request for a process. A command that is longer than a message may be is
// refused like a shorter one that is too long for Linux.
//
// connect's own answer is resource_exhausted, which clients take for a limit of requests and try
// again. It is given before an interceptor of a unary procedure runs, so the check is made here.
func (h *Handler) serveRPC(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case processpbconnect.ProcessServiceStartProcedure, processpbconnect.ProcessServiceExecuteProcedure:
		if refuse := connect.NewErrorWriter(); refuse.IsSupported(r) && overMessage(r) {
			err := fmt.Errorf("the command is too long: %s, and all of it %d bytes", agentapi.ArgumentLimit, maxMessage)
			_ = refuse.Write(w, r, connect.NewError(connect.CodeInvalidArgument, err)) // the client may have left
			return
		}
	}
	h.rpc.ServeHTTP(w, r)
}

// prefix is how many bytes of gRPC stand before a message: a flag, and its size in four bytes.
const prefix = 5

// overMessage tells whether the first message of a request is longer than a message may be. The
// request's body can be read as before.
func overMessage(r *http.Request) bool {
	if r.ContentLength > maxMessage+prefix {
		return true
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return false
	}
	body := bufio.NewReader(r.Body)
	r.Body = struct {
		io.Reader
		io.Closer
	}{body, r.Body}
	head, err := body.Peek(prefix)
	return err == nil && binary.BigEndian.Uint32(head[1:]) > maxMessage // connect tells what is wrong with less
}

// call is one request about files on its way.
type call struct {
	visit
	w    http.ResponseWriter
	r    *http.Request
	path string // of the sandbox
}

func (c *call) ctx() context.Context { return c.r.Context() }

// route knows the paths by their beginnings: what follows is a path of the sandbox's, which no mux may clean.
func (h *Handler) route(c *call) error {
	switch c.r.URL.Path {
	case "/v1/health":
		return h.health(c)
	case "/v1/metadata":
		return h.metadata(c)
	}
	rest, ok := strings.CutPrefix(c.r.URL.EscapedPath(), "/v1/files")
	if !ok || rest != "" && rest[0] != '/' {
		return fault.New(fault.NotFound, "there is no %s %.200s here; this port answers /v1/files, /v1/health and /v1/metadata", c.r.Method, c.r.URL.Path)
	}
	var err error
	if c.path, err = url.PathUnescape(strings.TrimPrefix(rest, "/")); err != nil {
		return fault.New(fault.Invalid, "the path is not percent-encoded as it should be")
	}
	switch c.r.Method {
	case http.MethodGet, http.MethodHead:
		return h.read(c)
	case http.MethodPut:
		return h.write(c)
	case http.MethodDelete:
		return h.remove(c)
	}
	c.w.Header().Set("Allow", "GET, HEAD, PUT, DELETE")
	return fault.New(fault.Unsupported, "use GET, HEAD, PUT or DELETE")
}

// fail tells why there is no answer.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, v visit, err error) {
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	err = h.explain(r.Context(), v, err)
	kind := fault.KindOf(err)
	if r.ProtoMajor == 1 && r.Method == http.MethodPut {
		w.Header().Set("Connection", "close") // what is left of the body is not waited for
	}
	answer(w, place.Status(kind), map[string]string{"code": string(kind), "message": fault.Message(err)})
}

// explain says why a sandbox is gone, and tells the operator what only the operator can change.
func (h *Handler) explain(ctx context.Context, v visit, err error) error {
	err = h.sandboxes.Explain(ctx, v.who, v.id, err)
	if fault.KindOf(err) == fault.Internal {
		h.log.ErrorContext(ctx, "request failed", "sandbox", v.id, "error", err)
	}
	return err
}

func answer(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // the client has gone: nobody to tell
}

package edge

import (
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// newProxy passes requests on to the ports of sandboxes.
func (e *Edge) newProxy() *rawport.Proxy {
	return rawport.New(rawport.Config{RetryFor: e.cfg.RetryFor, Strip: strip, Keys: e.cfg.Keys, Refuse: e.rawFailed}, e.sandboxes, e.log)
}

// serveRaw passes a request on to its port.
func (e *Edge) serveRaw(w http.ResponseWriter, r *http.Request, at route) {
	e.raw.Serve(w, r, at.visit(target.From(r.Context())))
}

func (at route) visit(t *target.Target) rawport.Visit {
	v := rawport.Visit{Who: t.Who, Sandbox: at.id, Port: at.port}
	if t.Options.MaskHost != "" {
		v.Host = strings.ReplaceAll(t.Options.MaskHost, "${PORT}", strconv.Itoa(at.port))
	}
	switch at.way {
	case byHost:
		v.Origin = rawport.OriginOwn
	case byPath:
		v.Origin, v.Path = rawport.OriginPath, pathPrefix+at.id+"/"+strconv.Itoa(at.port)+"/"
	case byHeader, bySignature:
		v.Origin = rawport.OriginShared
	}
	return v
}

// rawFailed answers for a port that did not.
func (e *Edge) rawFailed(w http.ResponseWriter, r *http.Request, v rawport.Visit, err error) {
	at := route{id: v.Sandbox, port: v.Port}
	if errors.Is(err, rawport.ErrServiceWorker) {
		refuse(w, r, at, &refusal{status: http.StatusForbidden, message: fault.Message(err)})
		return
	}
	if _, sb, lookup := e.sandboxes.Lookup(r.Context(), v.Sandbox); lookup != nil || sb.State != sandbox.StateRunning {
		refuse(w, r, at, notFound)
		return
	}
	var closed *rawport.ClosedError
	if errors.As(err, &closed) {
		refuse(w, r, at, portClosed(v.Port))
		return
	}
	if fault.Is(err, fault.Exhausted) {
		refuse(w, r, at, &refusal{status: http.StatusTooManyRequests, message: fault.Message(err), port: v.Port})
		return
	}
	refuse(w, r, at, &refusal{status: http.StatusBadGateway, message: "The sandbox is running but its port broke off the connection", port: v.Port})
}

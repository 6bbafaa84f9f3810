package envd

import (
	"net/http"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

const tokenHeader = "X-Access-Token"

// permit checks that a request for a file shows the sandbox's token or a signature made with it.
func (h *Handler) permit(r *http.Request, op target.Operation) error {
	t := target.From(r.Context())
	if !t.Options.Secure || r.Header.Get(tokenHeader) != "" {
		return h.permitToken(r)
	}
	return target.ReadSignature(r.URL.Query(), op).Check(h.tokens.Envd(t.Sandbox.ID), time.Now())
}

// permitToken is for what no signature covers.
func (h *Handler) permitToken(r *http.Request) error {
	t := target.From(r.Context())
	if !t.Options.Secure || target.Same(r.Header.Get(tokenHeader), h.tokens.Envd(t.Sandbox.ID)) {
		return nil
	}
	return fault.New(fault.Unauthed, "access token present in header but does not match")
}

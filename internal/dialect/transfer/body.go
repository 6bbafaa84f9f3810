// Package transfer is how bytes pass between the clients of every dialect and sandboxes: bodies that do not wait for ever, files
// that are read from wherever a client wants.
package transfer

import (
	"context"
	"io"
	"net/http"
	"time"
)

// bodyGrace is how long the next bytes of a request's body may take to come.
const bodyGrace = 2 * time.Minute

// Patient gives a request whose body does not wait for ever, neither for a client that stalls nor once the request's context
// is done. Call done when the request is answered: net/http reads on what a handler leaves, which must not wait either.
func Patient(w http.ResponseWriter, r *http.Request) (patient *http.Request, done func()) {
	if r.Body == nil || r.Body == http.NoBody {
		return r, func() {}
	}
	b := &body{ReadCloser: r.Body, ctx: r.Context(), to: http.NewResponseController(w)}
	patient = r.WithContext(b.ctx)
	patient.Body = b
	return patient, b.done
}

// body is one that is read with a deadline.
type body struct {
	io.ReadCloser
	ctx  context.Context // of the request that it belongs to; it lives no longer
	to   *http.ResponseController
	over bool // nothing is left that could be waited for
}

// past is a deadline that ends every wait.
var past = time.Unix(1, 0)

func (b *body) Read(p []byte) (int, error) {
	if err := b.bound(time.Now().Add(bodyGrace)); err != nil {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.over = err != nil
	if err != nil && err != io.EOF {
		b.set(past) // what is left does not come: net/http must not wait for it either
		return n, err
	}
	// The connection is read on, to hear whether the client leaves; and on HTTP/2 a deadline that passes between two reads
	// ends the body for good.
	_ = b.bound(time.Time{}) // the next read tells
	return n, err
}

// bound sets a deadline. Whoever cuts a request ends its context first and then sets a deadline in the past: that one must
// stand, so the context is looked at again after ours was set.
func (b *body) bound(t time.Time) error {
	if b.ctx.Err() == nil {
		b.set(t)
	}
	if b.ctx.Err() != nil {
		b.set(past)
		return context.Cause(b.ctx)
	}
	return nil
}

func (b *body) done() {
	if !b.over {
		_ = b.bound(time.Now().Add(bodyGrace)) // the request is over, whatever it says
	}
}

func (b *body) set(t time.Time) {
	_ = b.to.SetReadDeadline(t) // a writer without deadlines has no connection that could stall
}

package runtime

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/fault"
)

// refusal is an answer that has its status already.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

func refused(status int, format string, args ...any) error {
	return &refusal{status, fmt.Sprintf(format, args...)}
}

// fail tells why there is no answer.
func (rt *Runtime) fail(c *call, err error) {
	if c.ctx().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	var no *refusal
	if !errors.As(err, &no) {
		err = rt.sandboxes.Explain(c.ctx(), c.who, c.id, err)
		if fault.KindOf(err) == fault.Internal {
			rt.log.ErrorContext(c.ctx(), "request failed", "sandbox", c.id, "error", err)
		}
		no = &refusal{place.Status(fault.KindOf(err)), fault.Message(err)}
	}
	if c.r.ProtoMajor == 1 && c.r.Method == http.MethodPost {
		c.w.Header().Set("Connection", "close") // what is left of the body is not waited for
	}
	if no.status == http.StatusTooManyRequests || no.status == http.StatusServiceUnavailable {
		c.w.Header().Set("Retry-After", "1")
	}
	// One of the two is what clients look for: the runtime's word, and the router's.
	_ = c.answer(no.status, map[string]string{"message": no.message, "detail": no.message})
}

// Lost answers for the server that ran a command and is gone.
func Lost(w http.ResponseWriter, why string) {
	result := lost(why)
	result.Stderr += "\n"
	_ = send(w, http.StatusOK, result) // else the client has gone: nobody to tell
}

// answer sends JSON.
func (c *call) answer(status int, value any) error {
	c.unsent = send(c.w, status, value) != nil // a client that has gone hears nothing
	return nil
}

// send writes JSON. Bytes that are no UTF-8 become U+FFFD in it; a NUL stays one, because grep -Z parts names by them.
func send(w http.ResponseWriter, status int, value any) error {
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil {
		panic(err) // plain data
	}
	out := w.Header()
	out.Set("Content-Type", "application/json")
	out.Set("X-Content-Type-Options", "nosniff")
	out.Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(status)
	_, err := w.Write(body.Bytes())
	return err
}

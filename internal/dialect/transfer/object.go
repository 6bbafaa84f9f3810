package transfer

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// What the JSON of a control plane may take: such bodies are small, and whoever sends one has it.
const (
	maxObject   = 1 << 20
	objectGrace = 30 * time.Second
)

// TooLarge is the sentence about a body that is larger than any JSON of a control plane.
const TooLarge = "the request body is over the limit of 1 MiB"

// Await bounds how long a request's body may take to come. It is set before anything else, because net/http reads on after a
// handler that refused; whoever reads a body to its end clears it.
func Await(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		SetReadDeadline(w, time.Now().Add(objectGrace))
	}
}

// SetReadDeadline bounds what is read of a request's connection; the zero time is no bound.
func SetReadDeadline(w http.ResponseWriter, t time.Time) {
	_ = http.NewResponseController(w).SetReadDeadline(t) // a writer without deadlines has no connection that could stall
}

// Object reads a JSON body, which a tenant pays as ReadJSON says, into value; an absent one leaves
// value as it is. What is wrong with it is fault.Invalid, and of one that is too large also an
// *http.MaxBytesError.
func Object(w http.ResponseWriter, r *http.Request, tenant string, value any) error {
	body, err := ReadJSON(r.Context(), tenant, http.MaxBytesReader(w, r.Body, maxObject))
	var large *http.MaxBytesError
	var told *fault.Error
	switch {
	case errors.As(err, &told):
		return err
	case errors.As(err, &large):
		return fault.Wrap(fault.Invalid, err, TooLarge)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Invalid, err, "the request body did not come within %v", objectGrace)
	case err != nil:
		return fault.Wrap(fault.Invalid, err, "the request body could not be read")
	}
	SetReadDeadline(w, time.Time{})
	return Decode(body, value)
}

// Decode reads one JSON object: strict about types, so that a mistake is no default, and tolerant of fields that a newer
// client may send.
func Decode(body []byte, value any) error {
	body = bytes.Trim(body, " \t\r\n") // what JSON calls space, and nothing else that Unicode does
	if len(body) == 0 {
		return nil
	}
	if body[0] != '{' && json.Valid(body) {
		return fault.New(fault.Invalid, "the request body is not a JSON object")
	}
	err := json.Unmarshal(body, value)
	var typ *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &typ):
		return fault.New(fault.Invalid, "field %q cannot be a %s", typ.Field, typ.Value)
	case errors.As(err, &syntax):
		return fault.New(fault.Invalid, "the request body is not valid JSON at byte %d", syntax.Offset)
	}
	return fault.New(fault.Invalid, "the request body cannot be understood")
}

package execd

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"os"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

const (
	maxBody = 1 << 20                   // of a request that is not code
	maxCode = 2*sandbox.MaxCode + 1<<20 // escaping makes code longer
)

// decode reads a request's JSON. A body that is empty is one only where none is needed.
func (c *call) decode(limit int64, needed bool, value any) error {
	raw, err := transfer.ReadJSON(c.ctx(), c.t.Who.Tenant, http.MaxBytesReader(c.w, c.r.Body, limit))
	var large *http.MaxBytesError
	var told *fault.Error
	switch {
	case errors.As(err, &told):
		return err
	case errors.As(err, &large):
		return &refusal{http.StatusRequestEntityTooLarge, codeBody, "the request is too large"}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return invalid("the request did not come in time")
	case err != nil:
		return invalid("the request ended before its time")
	case len(bytes.TrimSpace(raw)) == 0 && !needed:
		return nil
	case len(bytes.TrimSpace(raw)) == 0:
		return invalid("the request has no body; it is JSON")
	}
	done, err := transfer.DecodeTurn(c.ctx(), raw)
	if err != nil {
		return err
	}
	defer done()
	return decode(raw, value)
}

// decode reads JSON and says what is wrong with it without repeating it.
func decode(raw []byte, value any) error {
	err := json.Unmarshal(raw, value)
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &kind) && kind.Field != "":
		return invalid(kind.Field + " cannot be a JSON " + kind.Value)
	case errors.As(err, &kind):
		return invalid("the body cannot be a JSON " + kind.Value)
	case err != nil:
		return invalid("the body is not valid JSON")
	}
	return nil
}

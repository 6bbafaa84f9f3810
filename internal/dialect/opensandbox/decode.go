package opensandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

const (
	maxBody   = 1 << 20
	bodyGrace = 30 * time.Second
)

// idForm is what an id of ours may look like; no other one was ever given out.
var idForm = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

// await bounds how long a request's body may take to come. It is set before anything else, because net/http reads on
// after a handler that refused; whoever reads a body to its end clears it.
func await(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		setReadDeadline(w, time.Now().Add(bodyGrace))
	}
}

func setReadDeadline(w http.ResponseWriter, t time.Time) {
	_ = http.NewResponseController(w).SetReadDeadline(t) // a writer without deadlines has no connection that could stall
}

// decode reads a JSON body into value; an absent one leaves it as it is.
func (c *call) decode(value any) error {
	body, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return told(http.StatusRequestEntityTooLarge, codeTooLarge, "the request body is over the limit of 1 MiB")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Invalid, err, "the request body did not come within %v", bodyGrace)
	case err != nil:
		return fault.Wrap(fault.Invalid, err, "the request body could not be read")
	}
	setReadDeadline(c.w, time.Time{})
	return Decode(body, value)
}

// Decode reads one JSON object: strict about types, so that a mistake is no default, and tolerant of fields that a newer
// client may send.
func Decode(body []byte, value any) error {
	body = bytes.TrimSpace(body)
	if len(body) == 0 {
		return nil
	}
	if body[0] != '{' && json.Valid(body) {
		return invalid("the request body is not a JSON object")
	}
	err := json.Unmarshal(body, value)
	var typ *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &typ):
		return invalid("field %q cannot be a %s", typ.Field, typ.Value)
	case errors.As(err, &syntax):
		return invalid("the request body is not valid JSON at byte %d", syntax.Offset)
	}
	return invalid("the request body cannot be understood")
}

// query reads query parameters and remembers the first thing that is wrong.
type query struct {
	url.Values
	err error
}

func (c *call) query() *query {
	values, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		err = invalid("the query cannot be understood")
	}
	return &query{values, err}
}

func (q *query) fail(err error) {
	if q.err == nil {
		q.err = err
	}
}

func (q *query) integer(name string, otherwise, low, high int) int {
	text := q.Get(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		q.fail(invalid("query parameter %s=%.40q: want an integer from %d to %d", name, text, low, high))
		return otherwise
	}
	return n
}

func (q *query) flag(name string) bool {
	text := q.Get(name)
	if text == "" {
		return false
	}
	b, err := strconv.ParseBool(strings.ToLower(text))
	if err != nil {
		q.fail(invalid("query parameter %s=%.40q: want true or false", name, text))
	}
	return b
}

// page is which part of a listing is asked for.
type page struct{ number, size int }

func (q *query) page() page {
	return page{q.integer("page", 1, 1, 1<<30), q.integer("pageSize", 20, 1, 200)}
}

// ParseFilter reads the metadata filter: a query string inside of one query parameter.
func ParseFilter(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	wrong := told(http.StatusBadRequest, codeFilter, "the metadata filter cannot be understood: want key=value pairs joined by &")
	pairs := map[string]string{}
	for part := range strings.SplitSeq(text, "&") {
		k, v, ok := strings.Cut(part, "=")
		key, errKey := url.QueryUnescape(k)
		value, errValue := url.QueryUnescape(v)
		if !ok || key == "" || errKey != nil || errValue != nil {
			return nil, wrong
		}
		if _, twice := pairs[key]; twice {
			return nil, told(http.StatusBadRequest, codeFilter, "the metadata filter names %.60q twice", key)
		}
		pairs[key] = value
	}
	return pairs, nil
}

package e2b

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
		const message = "the request body is over the limit of 1 MiB"
		return &exact{problem{Code: http.StatusRequestEntityTooLarge, Message: message}, fault.Wrap(fault.Invalid, err, message)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Wrap(fault.Invalid, err, "the request body did not come within %v", bodyGrace)
	case err != nil:
		return fault.Wrap(fault.Invalid, err, "the request body could not be read")
	}
	setReadDeadline(c.w, time.Time{})
	return Decode(body, value)
}

// Decode reads one JSON object: strict about types, so that a mistake is no default, and tolerant of fields that a newer
// SDK may send.
func Decode(body []byte, value any) error {
	body = bytes.TrimSpace(body)
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

// idForm is an id, alone or with the client's id that E2B once put behind it.
var idForm = regexp.MustCompile(`^([a-z0-9]{1,64})(-[a-z0-9]{1,64})?$`)

// sandboxID reads an id as SDKs of all ages write it.
func sandboxID(text string) (string, error) {
	m := idForm.FindStringSubmatch(text)
	if m == nil {
		return "", fault.New(fault.Invalid, "Invalid sandbox ID %.80q", text)
	}
	return m[1], nil
}

// query reads query parameters and remembers the first thing that is wrong.
type query struct {
	url.Values
	err error
}

func (c *call) query() *query {
	values, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		err = fault.New(fault.Invalid, "the query cannot be understood")
	}
	return &query{values, err}
}

func (q *query) fail(format string, args ...any) {
	if q.err == nil {
		q.err = fault.New(fault.Invalid, format, args...)
	}
}

func (q *query) integer(name string, otherwise, low, high int64) int64 {
	text := q.Get(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < low || n > high {
		q.fail("query parameter %s=%.40q: want an integer from %d to %d", name, text, low, high)
		return otherwise
	}
	return n
}

func (q *query) word(name, otherwise string, known ...string) string {
	text := q.Get(name)
	if text == "" {
		return otherwise
	}
	for _, k := range known {
		if text == k {
			return text
		}
	}
	q.fail("query parameter %s=%.40q: want one of %s", name, text, strings.Join(known, ", "))
	return otherwise
}

// list reads a parameter that is repeated, joined by commas, or both.
func (q *query) list(name string) []string {
	var all []string
	for _, text := range q.Values[name] {
		for part := range strings.SplitSeq(text, ",") {
			if part != "" {
				all = append(all, part)
			}
		}
	}
	return all
}

func (q *query) time(name string) time.Time {
	text := q.Get(name)
	if text == "" {
		return time.Time{}
	}
	// A plus that nobody encoded has become a space: time zones are the only place where one can stand.
	t, err := time.Parse(time.RFC3339, strings.ReplaceAll(text, " ", "+"))
	if err != nil {
		q.fail("query parameter %s=%.60q: want a time as in RFC 3339", name, text)
	}
	return t
}

// ParseMetadata reads the metadata filter: a form whose keys and values the SDKs have escaped once more.
func ParseMetadata(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	wrong := fault.New(fault.Invalid, "the metadata filter cannot be understood: want key=value pairs, escaped twice")
	form, err := url.ParseQuery(text)
	if err != nil {
		return nil, wrong
	}
	pairs := map[string]string{}
	for k, values := range form {
		key, err := url.PathUnescape(k)
		if err != nil {
			return nil, wrong
		}
		value, err := url.PathUnescape(values[0])
		if err != nil {
			return nil, wrong
		}
		if before, ok := pairs[key]; len(values) > 1 || ok && before != value {
			return nil, fault.New(fault.Invalid, "the metadata filter names %.60q twice", key)
		}
		pairs[key] = value
	}
	return pairs, nil
}

package e2b

import (
	"errors"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// decode reads a JSON body into value; an absent one leaves it as it is.
func (c *call) decode(value any) error {
	err := transfer.Object(c.w, c.r, c.who.Tenant, value)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return &exact{problem{Code: http.StatusRequestEntityTooLarge, Message: transfer.TooLarge}, err}
	}
	return err
}

// idForm is an id, alone or with the client's id that E2B once put behind it. Nobody looks up what follows the first hyphen, as
// upstream: SDKs expect an id that somebody made up to be not found, not refused.
var idForm = regexp.MustCompile(`^([a-z0-9]{1,64})(-[a-z0-9-]{0,128})?$`)

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

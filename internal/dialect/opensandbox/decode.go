package opensandbox

import (
	"errors"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/dialect/transfer"
)

// idForm is what an id of ours may look like; no other one was ever given out.
var idForm = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

// decode reads a JSON body into value; an absent one leaves it as it is.
func (c *call) decode(value any) error {
	err := transfer.Object(c.w, c.r, c.who.Tenant, value)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return told(http.StatusRequestEntityTooLarge, codeTooLarge, transfer.TooLarge)
	}
	return err
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

// given are the values of a parameter; an empty one says nothing.
func (q *query) given(name string) []string {
	return slices.DeleteFunc(slices.Clone(q.Values[name]), func(value string) bool { return value == "" })
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

package cove

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxBody = 1 << 20  // a request that only says what to do
	maxCode = 16 << 20 // a request that carries code or stdin
)

const (
	bodyGrace   = 30 * time.Second // for a request that says what to do
	uploadGrace = 60 * time.Second // between two bytes of a file
)

// await bounds how long a request's body may take to come. It is set before anything else, because net/http reads on
// after a handler that refused; whoever reads a body to its end clears it. A request without one keeps no deadline: it
// would end the stream that answers it.
func await(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		setReadDeadline(w, time.Now().Add(bodyGrace))
	}
}

func setReadDeadline(w http.ResponseWriter, t time.Time) {
	_ = http.NewResponseController(w).SetReadDeadline(t) // a writer without deadlines has no connection that could stall
}

// decode reads a JSON body into value and refuses what it does not know, so that a typo is an error and not a default.
// An empty body is an empty object, unless the route needs one.
func (c *call) decode(limit int64, value any) error {
	body, err := transfer.ReadJSON(c.ctx(), c.who.Tenant, http.MaxBytesReader(c.w, c.r.Body, limit))
	if err != nil {
		var told *fault.Error
		if errors.As(err, &told) {
			return err
		}
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return fault.New(fault.Invalid, "the request body is over the limit of %d bytes; put large content into a file with PUT …/files", tooLarge.Limit)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fault.Wrap(fault.Invalid, err, "the request body did not come within %v", bodyGrace)
		}
		return fault.Wrap(fault.Invalid, err, "the request body could not be read")
	}
	setReadDeadline(c.w, time.Time{})
	if c.needsBody && len(body) == 0 {
		return fault.New(fault.Invalid, "the request has no body: send a JSON object with %s", strings.Join(fields(reflect.TypeOf(value)), ", "))
	}
	done, err := transfer.DecodeTurn(c.ctx(), body)
	if err != nil {
		return err
	}
	defer done()
	return Decode(body, value)
}

// upload is the body of a request as long as bytes come: one that stalls must hold neither a handler nor a sandbox.
type upload struct {
	w    http.ResponseWriter
	body io.Reader
}

func (u *upload) Read(p []byte) (int, error) {
	setReadDeadline(u.w, time.Now().Add(uploadGrace))
	n, err := u.body.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		setReadDeadline(u.w, time.Time{})
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fault.Wrap(fault.Invalid, err, "the upload stalled: no byte came for %v", uploadGrace)
	}
	return n, err
}

// Decode reads one JSON object into value strictly; an empty body leaves value as it is. A field
// without a value is left out, not null: encoding/json would take null for every type.
func Decode(body []byte, value any) error {
	if len(body) == 0 {
		return nil
	}
	err := decodeStrictly(body, value)
	if typ := (*json.UnmarshalTypeError)(nil); errors.As(err, &typ) && strings.HasPrefix(typ.Value, "number") {
		err = decodeStrictly(plainIntegers(body), value)
	}
	if err != nil {
		return err
	}
	keys, null := outline(body)
	if null >= 0 {
		return fault.New(fault.Invalid, "the request body holds null at byte %d: leave out what has no value", null+1)
	}
	for _, name := range needed(reflect.TypeOf(value)) {
		if !slices.Contains(keys, name) {
			return fault.New(fault.Invalid, "field %q is missing", name)
		}
	}
	return nil
}

func decodeStrictly(body []byte, value any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(value); err != nil {
		return explainJSON(err, value)
	}
	if _, err := d.Token(); err != io.EOF {
		return fault.New(fault.Invalid, "the request body holds more than one JSON value")
	}
	return nil
}

// stringOrNumber finds strings, which stay as they are, and numbers that end in zeros after the point.
var stringOrNumber = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|-?[0-9]+\.0+(?:[,\]}\s]|$)`)

// plainIntegers writes 5.0 as 5: for JSON Schema it is an integer, and some languages write it so, but not for encoding/json.
func plainIntegers(body []byte) []byte {
	return stringOrNumber.ReplaceAllFunc(body, func(token []byte) []byte {
		point := bytes.IndexByte(token, '.')
		if token[0] == '"' || point < 0 {
			return token
		}
		return append(bytes.Clone(token[:point]), bytes.TrimLeft(token[point:], ".0")...)
	})
}

// outline reads valid JSON without its values: the names of the outermost object, and where the first null is; -1: nowhere.
func outline(body []byte) (keys []string, null int) {
	depth := 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case 'n':
			return keys, i
		case '"':
			end := endOfString(body, i+1)
			if rest := bytes.TrimLeft(body[end+1:], " \t\r\n"); depth == 1 && len(rest) > 0 && rest[0] == ':' {
				var key string
				_ = json.Unmarshal(body[i:end+1], &key) // the decoder has read it before
				keys = append(keys, key)
			}
			i = end
		}
	}
	return keys, -1
}

// endOfString finds the quote that ends the string of valid JSON whose first byte is at i.
func endOfString(body []byte, i int) int {
	for {
		i += bytes.IndexAny(body[i:], "\"\\")
		if body[i] == '"' {
			return i
		}
		i += 2
	}
}

// needed names the fields that a request of this type must have.
func needed(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for f := range structFields(t) {
		if !f.optional {
			names = append(names, f.name)
		}
	}
	return names
}

func explainJSON(err error, value any) error {
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	name, unknown := strings.CutPrefix(err.Error(), "json: unknown field ")
	switch {
	case unknown:
		return fault.New(fault.Invalid, "unknown field %s; known fields: %s", name, strings.Join(fields(reflect.TypeOf(value)), ", "))
	case errors.As(err, &typ) && typ.Field == "":
		return fault.New(fault.Invalid, "the request body is a JSON %s; send an object", typ.Value)
	case errors.As(err, &typ):
		return fault.Wrap(fault.Invalid, err, "field %q wants %s, not %s", typ.Field, jsonName(typ.Type), typ.Value)
	case errors.As(err, &syntax):
		return fault.New(fault.Invalid, "the request body is not valid JSON at byte %d: %s", syntax.Offset, syntax.Error())
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fault.New(fault.Invalid, "the request body is cut short: its JSON does not end")
	}
	return fault.New(fault.Invalid, "the request body cannot be understood: %s", strings.TrimPrefix(err.Error(), "json: "))
}

// fields names what a JSON object of this type may hold, nested objects included.
func fields(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for f := range structFields(t) {
		names = append(names, f.name)
		inner := f.typ
		for inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner != reflect.TypeFor[time.Time]() {
			for _, n := range fields(inner) {
				names = append(names, f.name+"."+n)
			}
		}
	}
	return names
}

func jsonName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	}
	return "an integer in the range of " + t.Kind().String()
}

// maxDuration is more than anybody means and far from overflow.
const maxDuration = 10 * 365 * 24 * time.Hour

// duration reads seconds; zero means that the caller did not say.
func duration(name string, seconds float64) (time.Duration, error) {
	if seconds < 0 || math.IsNaN(seconds) || seconds > maxDuration.Seconds() {
		return 0, fault.New(fault.Invalid, "%s %v is out of range: use 0 to %d", name, seconds, int64(maxDuration.Seconds()))
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// milliseconds rounds up, so that a tiny timeout is not none at all.
func milliseconds(name string, seconds float64) (int64, error) {
	d, err := duration(name, seconds)
	if err != nil {
		return 0, err
	}
	return int64((d + time.Millisecond - 1) / time.Millisecond), nil
}

// query reads query parameters strictly and remembers the first thing that is wrong.
type query struct {
	values url.Values
	err    error
}

// query refuses parameters that the route does not know.
func (c *call) query() *query {
	q := &query{values: c.r.URL.Query()}
	for name := range q.values {
		if !slices.ContainsFunc(c.known, func(p param) bool { return p.matches(name) }) {
			q.fail("unknown query parameter %q", name)
		}
	}
	return q
}

func (p param) matches(name string) bool {
	prefix, family := strings.CutSuffix(p.name, "*")
	if family {
		return strings.HasPrefix(name, prefix)
	}
	return name == p.name
}

func (q *query) fail(format string, args ...any) {
	if q.err == nil {
		q.err = fault.New(fault.Invalid, format, args...)
	}
}

func (q *query) text(name string) string { return q.values.Get(name) }

// cursor reads the cursor of a page, which has the form that the OpenAPI document gives.
func (q *query) cursor(form *regexp.Regexp) string {
	v := q.values.Get("cursor")
	if !form.MatchString(v) {
		q.fail("query parameter cursor=%.80q: want the cursor of the page before", v)
	}
	return v
}

func (q *query) required(name string) string {
	v := q.values.Get(name)
	if v == "" {
		q.fail("query parameter %q is missing", name)
	}
	return v
}

func (q *query) integer(name string, low, high int64) int64 {
	v := q.values.Get(name)
	if !q.values.Has(name) {
		return 0
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < low || n > high {
		q.fail("query parameter %s=%q: want an integer from %d to %d", name, v, low, high)
	}
	return n
}

func (q *query) flag(name string) bool {
	v := q.values.Get(name)
	if q.values.Has(name) && v != "true" && v != "false" {
		q.fail("query parameter %s=%q: want true or false", name, v)
	}
	return v == "true"
}

func (q *query) octal(name string) uint32 {
	v := q.values.Get(name)
	if v == "" {
		return 0
	}
	n, err := strconv.ParseUint(v, 8, 12)
	if err != nil {
		q.fail("query parameter %s=%q: want octal permission bits such as 0644", name, v)
	}
	return uint32(n)
}

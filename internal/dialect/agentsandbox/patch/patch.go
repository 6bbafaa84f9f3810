// Package patch changes JSON documents as patches say, in the two forms that have a standard. It knows nothing of what they hold.
package patch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

// maxOperations bounds a list of operations.
const maxOperations = 200

// ErrTooLarge is a patch that makes a document too large.
var ErrTooLarge = errors.New("the patch makes the document too large")

// OperationError is one operation of a list that cannot be carried out; nothing of the list counts then.
type OperationError struct {
	Index int
	Err   error
}

func (e *OperationError) Error() string { return fmt.Sprintf("operation %d: %v", e.Index, e.Err) }
func (e *OperationError) Unwrap() error { return e.Err }

func wrong(format string, args ...any) error { return fault.New(fault.Invalid, format, args...) }

// object is a JSON object.
type object = map[string]any

// Merge is a merge patch (RFC 7386): what is null goes, what is an object is merged, everything else is put. It changes to.
func Merge(to, p map[string]any) map[string]any {
	if to == nil {
		to = object{}
	}
	for name, v := range p {
		switch t := v.(type) {
		case nil:
			delete(to, name)
		case object:
			old, _ := to[name].(object)
			to[name] = Merge(old, t)
		default:
			to[name] = v
		}
	}
	return to
}

// operation is one of a JSON patch.
type operation struct {
	Op    string          `json:"op"`
	Path  *string         `json:"path"`
	From  *string         `json:"from"`
	Value json.RawMessage `json:"value"`
}

// Apply carries out a list of operations (RFC 6902) on doc, which it changes. With more than limit bytes at any time, as JSON, it is
// ErrTooLarge: a copy of a whole into a part of itself doubles what there is.
func Apply(doc any, list []byte, limit int) (any, error) {
	var ops []operation
	if json.Unmarshal(list, &ops) != nil || len(ops) > maxOperations {
		return nil, fault.New(fault.Invalid, "the patch is not a list of at most %d operations", maxOperations)
	}
	for i, op := range ops {
		var err error
		if doc, err = op.apply(doc); err != nil {
			return nil, &OperationError{i, err}
		}
		if op.Op == "copy" && size(doc) > limit {
			return nil, ErrTooLarge
		}
	}
	return doc, nil
}

func (op operation) apply(doc any) (any, error) {
	if op.Path == nil {
		return nil, wrong("it has no path")
	}
	to, err := pointer(*op.Path)
	if err != nil {
		return nil, err
	}
	switch op.Op {
	case "add", "replace", "test":
		value, err := decodeValue(op.Value)
		if err != nil {
			return nil, err
		}
		return op.put(doc, to, value)
	case "remove":
		doc, _, err = take(doc, to)
		return doc, err
	case "move", "copy":
		return op.carry(doc, to)
	}
	return nil, wrong("%.20q is not an operation", op.Op)
}

func (op operation) put(doc any, to []string, value any) (any, error) {
	if op.Op == "add" {
		return insert(doc, to, value)
	}
	old, err := look(doc, to)
	switch {
	case err != nil:
		return nil, err
	case op.Op == "test" && !same(old, value):
		return nil, wrong("the value at %.120q is another", *op.Path)
	case op.Op == "test":
		return doc, nil
	}
	if len(to) == 0 {
		return value, nil
	}
	if doc, _, err = take(doc, to); err != nil {
		return nil, err
	}
	return insert(doc, to, value)
}

func (op operation) carry(doc any, to []string) (any, error) {
	if op.From == nil {
		return nil, wrong("it has no from")
	}
	from, err := pointer(*op.From)
	if err != nil {
		return nil, err
	}
	value, err := look(doc, from)
	if err != nil {
		return nil, err
	}
	if op.Op == "copy" {
		return insert(doc, to, deep(value))
	}
	if len(to) > len(from) && slices.Equal(to[:len(from)], from) {
		return nil, wrong("it moves a value into itself")
	}
	if doc, _, err = take(doc, from); err != nil {
		return nil, err
	}
	return insert(doc, to, value)
}

// decodeValue keeps numbers as they are written.
func decodeValue(raw json.RawMessage) (v any, err error) {
	if raw == nil {
		return nil, wrong("it has no value")
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return v, d.Decode(&v)
}

func size(doc any) int {
	b, err := json.Marshal(doc)
	if err != nil {
		panic("a document is plain data: " + err.Error())
	}
	return len(b)
}

// same compares what two values say.
func same(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// deep is a copy that shares nothing.
func deep(v any) any {
	switch t := v.(type) {
	case object:
		c := make(object, len(t))
		for k, v := range t {
			c[k] = deep(v)
		}
		return c
	case []any:
		c := make([]any, len(t))
		for i, v := range t {
			c[i] = deep(v)
		}
		return c
	}
	return v
}

// pointer reads a JSON pointer.
func pointer(given string) ([]string, error) {
	if given == "" {
		return nil, nil
	}
	if given[0] != '/' || strings.Count(given, "/") > 100 {
		return nil, wrong("%.120q is not a path", given)
	}
	parts := strings.Split(given[1:], "/")
	for i, p := range parts {
		parts[i] = strings.ReplaceAll(strings.ReplaceAll(p, "~1", "/"), "~0", "~")
	}
	return parts, nil
}

func nothingAt(name string) error { return wrong("there is nothing at %.120q", name) }

func look(doc any, path []string) (any, error) {
	for _, name := range path {
		switch t := doc.(type) {
		case object:
			v, ok := t[name]
			if !ok {
				return nil, nothingAt(name)
			}
			doc = v
		case []any:
			i, err := index(name, len(t)-1)
			if err != nil {
				return nil, err
			}
			doc = t[i]
		default:
			return nil, nothingAt(name)
		}
	}
	return doc, nil
}

func index(name string, most int) (int, error) {
	i, err := strconv.Atoi(name)
	if err != nil || i < 0 || i > most || name != strconv.Itoa(i) {
		return 0, nothingAt(name)
	}
	return i, nil
}

// insert puts a value where a path leads.
func insert(doc any, path []string, value any) (any, error) {
	if len(path) == 0 {
		return value, nil
	}
	name, last := path[0], len(path) == 1
	switch t := doc.(type) {
	case object:
		if last {
			t[name] = value
			return t, nil
		}
		below, ok := t[name]
		if !ok {
			return nil, nothingAt(name)
		}
		v, err := insert(below, path[1:], value)
		t[name] = v
		return t, err
	case []any:
		if last && name == "-" {
			return append(t, value), nil
		}
		if last {
			i, err := index(name, len(t))
			if err != nil {
				return nil, err
			}
			return slices.Insert(t, i, value), nil
		}
		i, err := index(name, len(t)-1)
		if err != nil {
			return nil, err
		}
		t[i], err = insert(t[i], path[1:], value)
		return t, err
	}
	return nil, nothingAt(name)
}

// take takes a value out of where a path leads.
func take(doc any, path []string) (rest, taken any, err error) {
	if len(path) == 0 {
		return nil, doc, nil
	}
	name, last := path[0], len(path) == 1
	switch t := doc.(type) {
	case object:
		v, ok := t[name]
		if !ok {
			return nil, nil, nothingAt(name)
		}
		if last {
			delete(t, name)
			return t, v, nil
		}
		t[name], taken, err = take(v, path[1:])
		return t, taken, err
	case []any:
		i, err := index(name, len(t)-1)
		if err != nil {
			return nil, nil, err
		}
		if last {
			v := t[i]
			return slices.Delete(t, i, i+1), v, nil
		}
		t[i], taken, err = take(t[i], path[1:])
		return t, taken, err
	}
	return nil, nil, nothingAt(name)
}

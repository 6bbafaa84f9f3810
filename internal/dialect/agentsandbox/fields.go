package agentsandbox

import (
	"encoding/json"
	"maps"
)

// fields are a JSON object as it came: what we do not know is kept as it is. One that is part of an object in the store is
// never changed.
type fields = map[string]any

// at is what is found below names; nil: nothing.
func at(f fields, path ...string) any {
	var v any = f
	for _, name := range path {
		m, ok := v.(fields)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}

func text(f fields, path ...string) string {
	s, _ := at(f, path...).(string)
	return s
}

func inner(f fields, path ...string) fields {
	m, _ := at(f, path...).(fields)
	return m
}

func list(f fields, path ...string) []any {
	l, _ := at(f, path...).([]any)
	return l
}

// number is a whole number, or zero.
func number(v any) int64 {
	switch n := v.(type) {
	case json.Number:
		i, _ := n.Int64()
		return i
	case int64:
		return n
	case int:
		return int64(n)
	case float64:
		return int64(n)
	}
	return 0
}

// texts are the pairs of a map whose values are texts.
func texts(f fields, path ...string) map[string]string {
	m := inner(f, path...)
	if m == nil {
		return nil
	}
	pairs := make(map[string]string, len(m))
	for k, v := range m {
		if s, ok := v.(string); ok {
			pairs[k] = s
		}
	}
	return pairs
}

// deep is a copy that shares nothing.
func deep(v any) any {
	switch t := v.(type) {
	case fields:
		c := make(fields, len(t))
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

func deepFields(f fields) fields {
	if f == nil {
		return nil
	}
	return deep(f).(fields)
}

// with is a copy that has one more field, or another value for it; nil removes it.
func with(f fields, name string, value any) fields {
	c := maps.Clone(f)
	if c == nil {
		c = fields{}
	}
	if value == nil {
		delete(c, name)
		return c
	}
	c[name] = value
	return c
}

// without is a copy that lacks some.
func without(f fields, names ...string) fields {
	c := maps.Clone(f)
	for _, name := range names {
		delete(c, name)
	}
	return c
}

// same compares two values by what they say, whether they were read or are ours.
func same(a, b any) bool { return encode(a) == encode(b) }

// encode is JSON with sorted names. Values here come from JSON or are plain, so that it cannot fail.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("an object is plain data: " + err.Error())
	}
	return string(b)
}

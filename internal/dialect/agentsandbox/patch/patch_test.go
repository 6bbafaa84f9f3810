package patch_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/agentsandbox/patch"
	"github.com/covehq/cove/internal/fault"
)

func decode(t *testing.T, text string) (v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

func encode(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestMerge(t *testing.T) { // the examples of RFC 7386 that are about objects
	for _, c := range [][3]string{
		{`{"a":"b"}`, `{"a":"c"}`, `{"a":"c"}`}, {`{"a":"b"}`, `{"b":"c"}`, `{"a":"b","b":"c"}`}, {`{"a":"b"}`, `{"a":null}`, `{}`},
		{`{"a":"b","b":"c"}`, `{"a":null}`, `{"b":"c"}`}, {`{"a":["b"]}`, `{"a":"c"}`, `{"a":"c"}`}, {`{"a":"c"}`, `{"a":["b"]}`, `{"a":["b"]}`},
		{`{"a":{"b":"c"}}`, `{"a":{"b":"d","c":null}}`, `{"a":{"b":"d"}}`}, {`{"a":[{"b":"c"}]}`, `{"a":[1]}`, `{"a":[1]}`},
		{`{"e":null}`, `{"a":1}`, `{"a":1,"e":null}`}, {`{}`, `{"a":{"bb":{"ccc":null}}}`, `{"a":{"bb":{}}}`},
	} {
		got := patch.Merge(decode(t, c[0]).(map[string]any), decode(t, c[1]).(map[string]any))
		if encode(t, got) != c[2] {
			t.Errorf("%s with %s: %s, want %s", c[0], c[1], encode(t, got), c[2])
		}
	}
}

func TestApply(t *testing.T) { // after the examples of RFC 6902
	for _, c := range [][3]string{
		{`{"foo":"bar"}`, `[{"op":"add","path":"/baz","value":"qux"}]`, `{"baz":"qux","foo":"bar"}`},
		{`{"foo":["bar","baz"]}`, `[{"op":"add","path":"/foo/1","value":"qux"}]`, `{"foo":["bar","qux","baz"]}`},
		{`{"baz":"qux","foo":"bar"}`, `[{"op":"remove","path":"/baz"}]`, `{"foo":"bar"}`},
		{`{"foo":["bar","qux","baz"]}`, `[{"op":"remove","path":"/foo/1"}]`, `{"foo":["bar","baz"]}`},
		{`{"baz":"qux"}`, `[{"op":"replace","path":"/baz","value":1.50}]`, `{"baz":1.50}`},
		{`{"foo":{"bar":"baz","waldo":"fred"},"qux":{}}`, `[{"op":"move","from":"/foo/waldo","path":"/qux/thud"}]`, `{"foo":{"bar":"baz"},"qux":{"thud":"fred"}}`},
		{`{"foo":["all","grass","cows","eat"]}`, `[{"op":"move","from":"/foo/1","path":"/foo/3"}]`, `{"foo":["all","cows","eat","grass"]}`},
		{`{"baz":"qux","foo":["a",2,"c"]}`, `[{"op":"test","path":"/baz","value":"qux"},{"op":"test","path":"/foo/1","value":2}]`, `{"baz":"qux","foo":["a",2,"c"]}`},
		{`{"foo":"bar"}`, `[{"op":"add","path":"/child","value":{"grandchild":{}}}]`, `{"child":{"grandchild":{}},"foo":"bar"}`},
		{`{"/":9,"~1":10}`, `[{"op":"test","path":"/~01","value":10},{"op":"remove","path":"/~1"}]`, `{"~1":10}`},
		{`{"foo":["bar"]}`, `[{"op":"add","path":"/foo/-","value":["abc","def"]}]`, `{"foo":["bar",["abc","def"]]}`},
		{`{"a":{"b":1}}`, `[{"op":"copy","from":"/a","path":"/c"},{"op":"add","path":"/a/b","value":2}]`, `{"a":{"b":2},"c":{"b":1}}`},
		{`{"a":1}`, `[{"op":"replace","path":"","value":{"b":2}}]`, `{"b":2}`},
		{`{"a":1}`, `[]`, `{"a":1}`},
	} {
		got, err := patch.Apply(decode(t, c[0]), []byte(c[1]), 1000)
		if err != nil || encode(t, got) != c[2] {
			t.Errorf("%s with %s: %s %v, want %s", c[0], c[1], encode(t, got), err, c[2])
		}
	}
}

func TestWhatCannotBeDone(t *testing.T) {
	for list, says := range map[string]string{
		`[{"op":"add","path":"/x/y","value":1}]`:    "nothing at",
		`[{"op":"remove","path":"/x"}]`:             "nothing at",
		`[{"op":"replace","path":"/x","value":1}]`:  "nothing at",
		`[{"op":"add","path":"/l/3","value":1}]`:    "nothing at",
		`[{"op":"add","path":"/l/01","value":1}]`:   "nothing at",
		`[{"op":"add","path":"/l/-1","value":1}]`:   "nothing at",
		`[{"op":"add","path":"/a/b/c","value":1}]`:  "nothing at",
		`[{"op":"test","path":"/a","value":"1"}]`:   "another",
		`[{"op":"add","path":"/x"}]`:                "no value",
		`[{"op":"add","value":1}]`:                  "no path",
		`[{"op":"add","path":"x","value":1}]`:       "not a path",
		`[{"op":"move","path":"/x"}]`:               "no from",
		`[{"op":"move","from":"/l","path":"/l/0"}]`: "into itself",
		`[{"op":"merge","path":"/x","value":1}]`:    "not an operation",
	} {
		got, err := patch.Apply(decode(t, `{"a":1,"l":[1]}`), []byte(list), 1000)
		var failed *patch.OperationError
		if !errors.As(err, &failed) || failed.Index != 0 || !strings.Contains(err.Error(), says) || got != nil {
			t.Errorf("%s: %v %v, want %q", list, got, err, says)
		}
	}
	if _, err := patch.Apply(nil, []byte(`{}`), 1000); !fault.Is(err, fault.Invalid) {
		t.Errorf("no list: %v", err)
	}
	if _, err := patch.Apply(nil, []byte("["+strings.Repeat(`{"op":"test","path":"","value":null},`, 500)+`{}]`), 1000); !fault.Is(err, fault.Invalid) {
		t.Errorf("a long list: %v", err)
	}
	twice := strings.Repeat(`{"op":"copy","from":"","path":"/x"},{"op":"copy","from":"","path":"/y"},`, 50)
	if _, err := patch.Apply(decode(t, `{"a":"0123456789"}`), []byte("["+strings.TrimSuffix(twice, ",")+"]"), 1<<16); !errors.Is(err, patch.ErrTooLarge) {
		t.Errorf("what doubles: %v", err)
	}
}

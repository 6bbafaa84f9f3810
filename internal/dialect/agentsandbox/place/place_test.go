package place_test

import (
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
)

func TestCandidates(t *testing.T) {
	for name, want := range map[string][]string{
		"":            {"/app"},
		"x":           {"/app/x", "/x"},
		"tmp/x":       {"/app/tmp/x", "/tmp/x"},
		"../tmp/x":    {"/tmp/x"},
		"./x":         {"/app/x"},
		"/":           {"/", "/app"},
		"/tmp/x":      {"/tmp/x", "/app/tmp/x"},
		"//tmp//x":    {"/tmp/x", "/app/tmp/x"},
		"app/x":       {"/app/app/x", "/app/x"},
		"../../../..": {"/"},
	} {
		if diff := cmp.Diff(want, place.Candidates("/app", name)); diff != "" {
			t.Errorf("%q: %s", name, diff)
		}
	}
}

func TestIsHome(t *testing.T) {
	for name, want := range map[string]bool{
		"": true, "/": true, ".": true, "./": true, "app": true, "app/": true, "/app": true, "../app": true,
		"x": false, "app/x": false, "/app/x": false, "application": false, "..": false,
	} {
		if got := place.IsHome("/app", name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}

func FuzzCandidates(f *testing.F) {
	for _, name := range []string{"", "x", "/tmp/x", "../x", "./x", "a//../b", "..", "app/x", "\xff"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		list := place.Candidates("/app", name)
		if len(list) == 0 || len(list) > 2 || len(list) == 2 && list[0] == list[1] {
			t.Fatalf("%q means %q", name, list)
		}
		for _, at := range list {
			if !path.IsAbs(at) || path.Clean(at) != at {
				t.Fatalf("%q means %q", name, at)
			}
		}
		if first, ok := place.Ambiguous(name); ok && (first == "" || strings.Contains(first, "/") || first == "." || first == "..") {
			t.Fatalf("%q begins with %q", name, first)
		}
	})
}

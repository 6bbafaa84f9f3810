package client_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/client"
)

func TestAPullThatWasCutIsNoImage(t *testing.T) {
	for name, tc := range map[string]struct{ stream, want string }{
		"nothing":       {"", "cut"},
		"only progress": {`{"type":"progress","step":"resolve"}` + "\n", "cut"},
		"half a line":   {`{"type":"image","ima`, "cut"},
		"no JSON":       {"<html>", "stream of a pull"},
		"a fault":       {`{"type":"fault","fault":{"kind":"unavailable","message":"the registry is away"}}`, "the registry is away"},
	} {
		if info, err := client.DecodePull(strings.NewReader(tc.stream), nil); info != nil || err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
	}
	var steps []string
	info, err := client.DecodePull(strings.NewReader(`{"type":"progress","step":"resolve"}{"type":"progress","step":"done"}{"type":"image","image":{"reference":"x","template":"img-1","bytes":1}}`),
		func(e client.PullEvent) { steps = append(steps, e.Step) })
	if err != nil || info.Template != "img-1" || strings.Join(steps, " ") != "resolve done" {
		t.Errorf("%+v, %v, %q", info, err, steps)
	}
}

func FuzzPull(f *testing.F) {
	f.Add(`{"type":"progress","step":"download","done":1,"total":2}` + "\n" + `{"type":"image","image":{}}`)
	f.Fuzz(func(t *testing.T, stream string) {
		if info, err := client.DecodePull(strings.NewReader(stream), func(client.PullEvent) {}); (info == nil) == (err == nil) {
			t.Errorf("%+v, %v", info, err)
		}
	})
}

package cove_test

import (
	"encoding/json"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fault"
)

func FuzzARequestIsDecodedOrRefusedAsInvalid(f *testing.F) {
	for _, seed := range []string{``, `{}`, `{"template":"x","limits":{"cpus":1}}`, `{"x":1}`, `[`, `null`, `{"timeout_seconds":1e400}`, `{} {}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, value := range []any{&client.CreateRequest{}, &client.RunRequest{}, &client.ExecRequest{}, &client.Network{}, &client.ChmodRequest{}} {
			err := cove.Decode(body, value)
			if err != nil && !fault.Is(err, fault.Invalid) {
				t.Errorf("%T: %v", value, err)
			}
			if err == nil && len(body) > 0 && !json.Valid(body) {
				t.Errorf("%T took %q", value, body)
			}
		}
	})
}

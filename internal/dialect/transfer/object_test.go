package transfer_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

func TestAnObjectIsReadOrRefused(t *testing.T) {
	type asked struct {
		Name string `json:"name"`
	}
	for name, c := range map[string]struct {
		body, want, message string
	}{
		"an object":              {`{"name":"a","new":1}`, "a", ""},
		"nothing":                {"", "before", ""},
		"blanks":                 {" \n", "before", ""},
		"a list":                 {`[1]`, "before", "the request body is not a JSON object"},
		"half of an object":      {`{"name":`, "before", "the request body is not valid JSON at byte 8"},
		"another type":           {`{"name":1}`, "before", `field "name" cannot be a number`},
		"two objects":            {`{} {}`, "before", "the request body is not valid JSON at byte 4"},
		"more than there may be": {`{"name":"` + strings.Repeat("a", 1<<20) + `"}`, "before", transfer.TooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			got := asked{"before"}
			err := transfer.Object(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", strings.NewReader(c.body)), "", &got)
			if got.Name != c.want || (err == nil) != (c.message == "") || err != nil && (!fault.Is(err, fault.Invalid) || fault.Message(err) != c.message) {
				t.Errorf("%+v, %v", got, err)
			}
			var large *http.MaxBytesError
			if errors.As(err, &large) != (c.message == transfer.TooLarge) {
				t.Errorf("%v", err)
			}
		})
	}
}

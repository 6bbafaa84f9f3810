package target_test

import (
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b/target"
)

func TestSDKsAreToldWhetherToTryAgain(t *testing.T) {
	for status, want := range map[int]http.Header{
		http.StatusTooManyRequests:    {"Should-Retry": {"false"}},
		http.StatusGatewayTimeout:     {"Should-Retry": {"false"}},
		http.StatusServiceUnavailable: {"Retry-After": {"1"}},
		http.StatusNotFound:           {},
	} {
		got := http.Header{}
		target.Advise(got, status)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d: %s", status, diff)
		}
	}
}

// Package slow marks tests that take many seconds, so that `make test` is over within ten minutes on two
// processors. `make test-slow` runs what is marked.
package slow

import "testing"

// Test skips a test in `make test`. It is the first line of a test: test/slow/names looks for it there.
func Test(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("slow: make test-slow runs it")
	}
}

// Package slow marks tests that take many seconds. `make test` leaves them out, and `make
// test-slow` runs them.
package slow

import "testing"

// Test skips a test in `make test`. It is the first line of a test: test/slow/names looks for it
// there.
func Test(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("slow: make test-slow runs it")
	}
}

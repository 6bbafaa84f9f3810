package maker

import "testing"

// TestWritten_Since deletes and promises space while a sandbox writes: the growth of its file system is
// what it took from the host's disk.
func TestWritten_Since(t *testing.T) {
	before := written{allocated: 100, used: 50}
	for _, c := range []struct {
		name string
		now  written
		want int64
	}{
		{"nothing", written{100, 50}, 0},
		{"written and on the host's disk", written{110, 50}, 10},
		{"written and on its way there", written{100, 60}, 10},
		{"written while a promise (fallocate) was deleted", written{110, 20}, 10},
		{"written while as much was deleted", written{110, 50}, 10},
		{"deleted, its place kept", written{100, 10}, 0},
		{"deleted and given back", written{60, 10}, -40},
	} {
		if got := c.now.since(before); got != c.want {
			t.Errorf("%s: grown by %d, want %d", c.name, got, c.want)
		}
	}
}

package maker

import "testing"

// TestDiskUse_Since deletes and promises space while a sandbox writes: its file system has grown by
// what it took from the host's disk, at least.
func TestDiskUse_Since(t *testing.T) {
	before := diskUse{allocated: 100, used: 50}
	for _, c := range []struct {
		name string
		now  diskUse
		want int64
	}{
		{"nothing", diskUse{100, 50}, 0},
		{"written and on the host's disk", diskUse{110, 50}, 10},
		{"written and on its way there", diskUse{100, 60}, 10},
		{"written, and within the same time on the host's disk", diskUse{110, 60}, 20},
		{"written while a promise (fallocate) was deleted", diskUse{110, 20}, 10},
		{"written while as much was deleted", diskUse{110, 50}, 10},
		{"deleted, its place kept", diskUse{100, 10}, 0},
		{"deleted and given back", diskUse{60, 10}, -40},
	} {
		if got := c.now.since(before); got != c.want {
			t.Errorf("%s: grown by %d, want %d", c.name, got, c.want)
		}
	}
}

package cgroup

import (
	"strings"
	"testing"
)

func TestHoldsPages(t *testing.T) {
	none := "cache 0\nrss 0\nrss_huge 0\npgpgin 12\npgfault 900\ninactive_anon 0\nactive_anon 0\ninactive_file 0\nactive_file 0\n" +
		"unevictable 0\nhierarchical_memory_limit 9223372036854771712\ntotal_cache 0\n"
	for _, c := range []struct {
		name, stat string
		want       bool
	}{
		{"nothing left", none, false},
		{"pages of files", strings.Replace(none, "cache 0", "cache 4096", 1), true},
		{"memory", strings.Replace(none, "rss 0", "rss 4096", 1), true},
		{"on a list only", strings.Replace(none, "inactive_file 0", "inactive_file 8192", 1), true},
		{"locked", strings.Replace(none, "unevictable 0", "unevictable 4096", 1), true},
		{"nothing that is known", "anon 0\nfile 0\n", true},
		{"empty", "", true},
	} {
		if got := holdsPages(c.stat); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

package maker_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/driver/native/maker"
)

func TestWhichZygoteForks(t *testing.T) {
	const hour = time.Hour
	for _, c := range []struct {
		claim string
		all   []maker.Zygote
		best  int
		kept  []int
		spare bool
	}{
		{"a new one has room to spare", []maker.Zygote{{}}, 0, []int{0}, true},
		{"with nearly all that it may have the next is started", []maker.Zygote{{Living: 500}}, 0, []int{0}, false},
		{"with more than it should have it goes on until there is another", []maker.Zygote{{Living: 700}}, 0, []int{0}, false},
		{"with twice that it does not", []maker.Zygote{{Living: 1024}}, -1, []int{0}, false},
		{"the one with fewest children forks", []maker.Zygote{{Living: 9}, {Living: 7}, {Living: 8}}, 1, []int{0, 1, 2}, true},
		{"the next is started before the last fork", []maker.Zygote{{Forks: 4500, Living: 3}}, 0, []int{0}, false},
		{"and before the last hour is over", []maker.Zygote{{Age: 5*hour + hour/2, Living: 3}}, 0, []int{0}, false},
		{"an old one goes on while there is no other", []maker.Zygote{{Forks: 5000, Living: 3}}, 0, []int{0}, false},
		{"also when nobody lives", []maker.Zygote{{Forks: 5000}}, 0, []int{0}, false},
		{"of old ones the one with fewest", []maker.Zygote{{Forks: 5000, Living: 3}, {Age: 7 * hour, Living: 2}}, 1, []int{0, 1}, false},
		{"a younger one takes over", []maker.Zygote{{Forks: 5000, Living: 3}, {Living: 400}}, 1, []int{0, 1}, true},
		{"whatever the order", []maker.Zygote{{Living: 400}, {Forks: 5000, Living: 3}}, 0, []int{0, 1}, true},
		{"and the old one ends with its last child", []maker.Zygote{{Age: 7 * hour}, {Living: 4}}, 1, []int{1}, true},
	} {
		t.Run(c.claim, func(t *testing.T) {
			best, kept, spare := maker.Choose(c.all...)
			if best != c.best || spare != c.spare || !cmp.Equal(kept, c.kept) {
				t.Errorf("took %d, kept %v, spare %v; want %d, %v, %v", best, kept, spare, c.best, c.kept, c.spare)
			}
		})
	}
}

func TestAnOrderToForkIsWrittenAsTheShimReadsIt(t *testing.T) {
	got, err := maker.ShortOrder(1000, 2, []int{3, 1 << 24}, "token", "/home", true)
	want := "F\x01\x02\x05" + "\xe8\x03\x00\x00" + "\x02\x00\x00\x00" + "\x00\x00\x00\x00" + "\x03\x00\x00\x00" + "\x00\x00\x00\x01" + "token/home"
	if err != nil || string(got) != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	for claim, order := range map[string]func() ([]byte, error){
		"many groups":  func() ([]byte, error) { return maker.ShortOrder(0, 0, make([]int, 65), "t", "/", false) },
		"a long token": func() ([]byte, error) { return maker.ShortOrder(0, 0, nil, strings.Repeat("t", 64), "/", false) },
		"a long path":  func() ([]byte, error) { return maker.ShortOrder(0, 0, nil, "t", strings.Repeat("/", 4097), false) },
	} {
		if _, err := order(); err == nil {
			t.Errorf("%s: it was written", claim)
		}
	}
}

package artifact_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
)

// FuzzToken: no token opens anything but the one that was made for it.
func FuzzToken(f *testing.F) {
	w := newWorld(f, defaults)
	w.put("a.txt", "a")
	a := w.collect("run1")[0]
	good := token(f, w.Keeper, a, 0)
	head, tail, _ := strings.Cut(good, ".")
	for _, s := range []string{"", ".", good, head, head + ".", "." + tail, good + "=", good + ".x", head + "." + head, strings.ToUpper(good), "e30." + tail} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := w.Redeem(t.Context(), a.ID, s)
		switch {
		case s == good:
			if err != nil || got.ID != a.ID {
				t.Fatal(err)
			}
		case err == nil:
			t.Fatalf("%q opens it", s)
		case !fault.Is(err, fault.Unauthed):
			t.Fatalf("%q: %v", s, err)
		}
	})
}

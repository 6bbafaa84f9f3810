package maker_test

import (
	"testing"

	"github.com/covehq/cove/internal/driver/native/maker"
)

func TestDefaultReserve(t *testing.T) {
	for _, c := range []struct{ total, want int64 }{
		{1 << 30, 1 << 30 / 10}, // a tenth of a small one
		{12 << 30, 1 << 30},
		{40 << 30, 2 << 30}, // a twentieth
		{1 << 40, 4 << 30},
	} {
		if got := maker.DefaultReserve(c.total); got != c.want {
			t.Errorf("of %d bytes %d stay free, want %d", c.total, got, c.want)
		}
	}
}

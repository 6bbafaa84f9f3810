package interpreter

import (
	"bytes"
	"errors"
	"testing"
	"testing/iotest"
)

func TestLongBodiesShareABudget(t *testing.T) {
	for name, c := range map[string]struct {
		length int
		budget int64
		want   error
	}{
		"nothing":                           {0, 0, nil},
		"a short one needs none":            {maxSmall - 1, 0, nil},
		"a long one":                        {1 << 20, 4 << 20, nil},
		"a long one where nothing is left":  {1 << 20, 0, errBusy},
		"a long one where little is left":   {4 << 20, 1 << 20, errBusy},
		"the longest in the server's share": {maxBody, maxInFlight, nil},
	} {
		b := budget{left: c.budget}
		body := bytes.Repeat([]byte("x"), c.length)
		got, err := readCounted(bytes.NewReader(body), &b)
		if !errors.Is(err, c.want) || err == nil && !bytes.Equal(got, body) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if b.left != c.budget {
			t.Errorf("%s: %d of %d came back", name, b.left, c.budget)
		}
	}
	broken, b := errors.New("broken"), budget{left: 1 << 30}
	if _, err := readCounted(iotest.ErrReader(broken), &b); !errors.Is(err, broken) {
		t.Error(err)
	}
}

// Occupy makes a sandbox look as if contexts of it were being made.
func (in *Interpreter) Occupy(id string, n int) (free func()) {
	for range n {
		in.making.begin(id)
	}
	return func() {
		for range n {
			in.making.end(id)
		}
	}
}

// MaxContexts is how many a sandbox may have.
const MaxContexts = maxContexts

package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// within runs f as one request of a budget.
func within(b *transfer.Budget, f func(ctx context.Context)) {
	h := b.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { f(r.Context()) }))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/", nil))
}

func TestReadJSON_Budget(t *testing.T) {
	for name, c := range map[string]struct {
		length       int
		total, share int64
		want         error
	}{
		"nothing":                    {0, 0, 0, nil},
		"a short body is free":       {transfer.FreeBody - 1, 0, 0, nil},
		"a long body":                {1 << 20, 4 << 20, 2 << 20, nil},
		"no share":                   {1 << 20, 4 << 20, 0, transfer.ErrShare},
		"a share that is too small":  {4 << 20, 8 << 20, 1 << 20, transfer.ErrShare},
		"a total that is too small":  {4 << 20, 1 << 20, 8 << 20, transfer.ErrTotal},
		"the longest body there is":  {49 << 20, 128 << 20, 64 << 20, nil},
		"exactly what a body may be": {1 << 20, 1 << 20, 1 << 20, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := transfer.NewBudget(c.total, c.share)
			body := bytes.Repeat([]byte(" "), c.length)
			within(b, func(ctx context.Context) {
				got, err := transfer.ReadJSON(ctx, "acme", iotest.DataErrReader(bytes.NewReader(body)))
				if !errors.Is(err, c.want) || err == nil && !bytes.Equal(got, body) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
				if used := b.Used(); err == nil && used < int64(c.length-transfer.FreeBody) {
					t.Errorf("%d bytes are counted while the request lasts", used)
				}
			})
			if used := b.Used(); used != 0 {
				t.Errorf("%d bytes are counted after the request", used)
			}
		})
	}
}

func TestReadJSON_BrokenBody(t *testing.T) {
	broken := errors.New("broken")
	for _, length := range []int{0, 1 << 20} {
		b := transfer.NewBudget(1<<30, 1<<30)
		within(b, func(ctx context.Context) {
			_, err := transfer.ReadJSON(ctx, "acme", io.MultiReader(strings.NewReader(strings.Repeat(" ", length)), iotest.ErrReader(broken)))
			if !errors.Is(err, broken) {
				t.Error(err)
			}
		})
		if b.Used() != 0 {
			t.Errorf("%d bytes are left", b.Used())
		}
	}
}

func TestBudget_TenantsAndTotal(t *testing.T) {
	b := transfer.NewBudget(3<<20, 2<<20)
	read := func(ctx context.Context, tenant string) error {
		_, err := transfer.ReadJSON(ctx, tenant, strings.NewReader(strings.Repeat(" ", 1<<20)))
		return err
	}
	within(b, func(first context.Context) {
		within(b, func(second context.Context) {
			if err := errors.Join(read(first, "acme"), read(second, "acme")); err != nil {
				t.Fatal(err)
			}
			within(b, func(ctx context.Context) {
				if err := read(ctx, "acme"); !errors.Is(err, transfer.ErrShare) {
					t.Errorf("more than the share: %v", err)
				}
				if err := read(ctx, "globex"); err != nil {
					t.Errorf("another tenant: %v", err)
				}
				within(b, func(ctx context.Context) {
					if err := read(ctx, "initech"); !errors.Is(err, transfer.ErrTotal) {
						t.Errorf("more than the total: %v", err)
					}
				})
			})
		})
		within(b, func(ctx context.Context) {
			if err := read(ctx, "acme"); err != nil {
				t.Errorf("after a request has ended: %v", err)
			}
		})
	})
}

func TestKeep_AfterTheAnswer(t *testing.T) {
	b := transfer.NewBudget(1<<20, 1<<20)
	var done func()
	within(b, func(ctx context.Context) {
		if _, err := transfer.ReadJSON(ctx, "acme", strings.NewReader(strings.Repeat(" ", 1<<20))); err != nil {
			t.Fatal(err)
		}
		done = transfer.Keep(ctx)
	})
	if b.Used() == 0 {
		t.Error("the work that goes on is not counted")
	}
	done()
	done()
	if b.Used() != 0 {
		t.Errorf("%d bytes are left", b.Used())
	}
}

func TestReadJSON_Values(t *testing.T) {
	long := strings.Repeat(" ", transfer.FreeBody)
	for name, c := range map[string]struct {
		body string
		ok   bool
	}{
		"as many as there may be":      {"[" + strings.Repeat(`"",`, transfer.MaxValues-1) + `""]`, true},
		"one too many":                 {long + "[" + strings.Repeat(`"",`, transfer.MaxValues) + `""]`, false},
		"too many objects":             {long + strings.Repeat("{", transfer.MaxValues+1), false},
		"commas and quotes in strings": {long + `["` + strings.Repeat(`,\",[{`, transfer.MaxValues) + `"]`, true},
		"strings that end in escapes":  {long + `["\\"` + strings.Repeat(`,"\\"`, transfer.MaxValues+1) + `]`, false},
		"a string that does not end":   {long + `["\` + strings.Repeat(`,`, transfer.MaxValues+1), true},
		"a large text":                 {`{"stdin":"` + strings.Repeat("a,", 1<<20) + `"}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := transfer.ReadJSON(t.Context(), "acme", strings.NewReader(c.body))
			if (err == nil) != c.ok || err != nil && !fault.Is(err, fault.Invalid) {
				t.Error(err)
			}
		})
	}
}

func TestDecodeTurn_Waits(t *testing.T) {
	large := make([]byte, 1<<20)
	within(transfer.NewBudget(0, 0), func(ctx context.Context) {
		var leave []func()
		for range 4 {
			ctx, cancel := context.WithCancel(ctx)
			if len(leave) > 0 {
				cancel() // there may be one turn only
			}
			if done, err := transfer.DecodeTurn(ctx, large); err == nil {
				leave = append(leave, done)
			}
			cancel()
		}
		gone, cancel := context.WithCancel(ctx)
		cancel()
		for range 100 { // select is free to choose a turn, if there is one
			if done, err := transfer.DecodeTurn(gone, large); err == nil {
				leave = append(leave, done)
			}
		}
		if len(leave) == 0 || len(leave) > 4 {
			t.Errorf("%d large bodies are decoded at once", len(leave))
		}
		if _, err := transfer.DecodeTurn(gone, large[:1000]); err != nil {
			t.Errorf("a small body waits: %v", err)
		}
		for _, done := range leave {
			done()
		}
		if _, err := transfer.DecodeTurn(ctx, large); err != nil {
			t.Error(err)
		}
	})
}

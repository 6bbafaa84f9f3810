package transfer_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
)

// line is a connection: what it would wait for without a deadline never comes.
type line struct {
	http.ResponseWriter
	content  string // comes first
	deadline time.Time
	onBound  func() // happens just before the next deadline is set
	onRead   func() // happens while the next read waits
}

var errForEver = errors.New("this read waits for ever")

func (l *line) SetReadDeadline(t time.Time) error {
	if f := l.onBound; f != nil {
		l.onBound = nil
		f()
	}
	l.deadline = t
	return nil
}

func (l *line) Close() error { return nil }

func (l *line) Read(p []byte) (int, error) {
	if f := l.onRead; f != nil {
		l.onRead = nil
		f()
	}
	switch left := time.Until(l.deadline); {
	case l.deadline.IsZero():
		return 0, errForEver
	case left < 0:
		return 0, os.ErrDeadlineExceeded
	case left > 5*time.Minute:
		return 0, errForEver
	}
	if l.content == "" {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(p, l.content)
	l.content = l.content[n:]
	return n, nil
}

func newLine(ctx context.Context, content string) (*line, *http.Request) {
	l := &line{ResponseWriter: httptest.NewRecorder(), content: content}
	r := httptest.NewRequestWithContext(ctx, "POST", "/", nil)
	r.Body = l
	return l, r
}

func TestABodyDoesNotWaitForEver(t *testing.T) {
	l, r := newLine(t.Context(), "begun")
	r, done := transfer.Patient(l, r)
	if n, err := r.Body.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if !l.deadline.IsZero() {
		t.Error("the deadline of a read outlives it: whoever listens for the client to leave hears that it did")
	}
	if b, err := io.ReadAll(r.Body); string(b) != "egun" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", b, err)
	}
	done()
	if _, err := l.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("net/http waits for the rest:", err)
	}
	t.Run("nor for what a handler leaves", func(t *testing.T) {
		l, r := newLine(t.Context(), "")
		_, done := transfer.Patient(l, r)
		done()
		if _, err := l.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	})
	t.Run("and one that is not there is left alone", func(t *testing.T) {
		l, r := newLine(t.Context(), "")
		r.Body = http.NoBody
		_, done := transfer.Patient(l, r)
		done()
		if !l.deadline.IsZero() {
			t.Error("there is a deadline")
		}
	})
}

// TestACutStands: whoever cuts a request sets a deadline in the past, which no read may replace.
func TestACutStands(t *testing.T) {
	errCut := errors.New("cut")
	past := time.Unix(1, 0)
	for name, when := range map[string]func(l *line, cut func()){
		"between two reads":       func(_ *line, cut func()) { cut() },
		"while a deadline is set": func(l *line, cut func()) { l.onBound = cut },
		"while a read waits":      func(l *line, cut func()) { l.onRead = cut },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			l, r := newLine(ctx, "ab")
			r, done := transfer.Patient(l, r)
			if _, err := r.Body.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			when(l, func() {
				cancel(errCut)
				l.deadline = past
			})
			if n, err := r.Body.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("%d, %v", n, err)
			}
			if n, err := r.Body.Read(make([]byte, 1)); n != 0 || !errors.Is(err, errCut) {
				t.Errorf("%d, %v", n, err)
			}
			done()
			if !l.deadline.Equal(past) {
				t.Errorf("the deadline is %v", l.deadline)
			}
		})
	}
}

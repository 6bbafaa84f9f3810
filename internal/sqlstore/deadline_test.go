package sqlstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

func TestPostgres_HangsAndIsUnavailable(t *testing.T) {
	proxy := pgtest.NewProxy(t, pgtest.URL(t))
	s := openPostgres(t, proxy.URL)
	if err := s.Insert(t.Context(), record("sb1")); err != nil {
		t.Fatal(err)
	}
	proxy.Stall()
	calls := map[string]func(context.Context) error{
		"get":  func(ctx context.Context) error { _, err := s.Get(ctx, "sb1"); return err },
		"list": func(ctx context.Context) error { _, err := s.List(ctx, "acme", sandbox.ListQuery{}); return err },
		"sessions": func(ctx context.Context) error {
			_, err := s.Sessions(ctx, "acme", session.Query{Limit: 9})
			return err
		},
		"document": func(ctx context.Context) error { _, err := s.Document(ctx, "acme", "x", "y"); return err },
		"key":      func(ctx context.Context) error { _, err := s.KeyByHash(ctx, "x"); return err },
		"touch":    func(ctx context.Context) error { return s.TouchKey(ctx, "k", time.Now()) },
		"insert":   func(ctx context.Context) error { return s.Insert(ctx, record("sb2")) },
		"save":     func(ctx context.Context) error { return s.Save(ctx, record("sb1")) },
		"put":      func(ctx context.Context) error { return s.PutDocument(ctx, "acme", "x", "y", nil) },
	}
	// A call without a deadline would wait for this one, which is far longer than the store's.
	patient, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	var all sync.WaitGroup
	for what, call := range calls {
		all.Go(func() {
			err := call(patient)
			if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "database does not answer") {
				t.Errorf("%s: %v (%s: %s)", what, err, fault.KindOf(err), fault.Message(err))
			}
			if !errors.Is(err, sandbox.ErrStoreLate) {
				t.Errorf("%s: %v is not known as a late answer", what, err)
			}
		})
	}
	all.Wait()

	left, leave := context.WithCancel(t.Context())
	leave()
	if err := calls["list"](left); !errors.Is(err, context.Canceled) || fault.Is(err, fault.Unavailable) {
		t.Errorf("a caller who left is told %v", err)
	}
	hasty, end := context.WithTimeout(t.Context(), time.Millisecond)
	defer end()
	if err := calls["list"](hasty); !errors.Is(err, context.DeadlineExceeded) || fault.Is(err, fault.Unavailable) {
		t.Errorf("a caller with a deadline of its own is told %v", err)
	}

	proxy.Resume()
	until(t, "the database answers again", func() bool { return calls["list"](t.Context()) == nil && calls["save"](t.Context()) == nil })
}

// TestPostgres_HangsAtChanges is a database that answers reads while no change comes to an end.
func TestPostgres_HangsAtChanges(t *testing.T) {
	s := openPostgres(t, pgtest.URL(t))
	// A busy machine is late with a read. The lock below ends after 30 s, and a wait for it after
	// 15 s.
	s.SetLimits(5*time.Second, 3*time.Second)
	s.SetDoubt(2 * time.Second)
	held, err := s.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback() }()
	if _, err := held.ExecContext(t.Context(), "LOCK TABLE documents IN SHARE MODE"); err != nil {
		t.Fatal(err)
	}
	put := func() error { return s.PutDocument(t.Context(), "acme", "x", "y", nil) }
	for range 2 {
		if err := put(); !fault.Is(err, fault.Unavailable) {
			t.Errorf("a change: %v (%s)", err, fault.KindOf(err))
		}
		for range 20 {
			if _, err := s.Documents(t.Context(), "acme", "x"); err != nil {
				t.Errorf("a read: %v", err)
			}
		}
		until(t, "the next change does not wait for the whole limit", s.Suspect)
	}
	if err := held.Rollback(); err != nil {
		t.Fatal(err)
	}
	until(t, "the database takes changes again", func() bool { return put() == nil && !s.Suspect() })
}

// TestPostgres_OneLateCall is a database that answers a call late and does everything else in time.
func TestPostgres_OneLateCall(t *testing.T) {
	s := openPostgres(t, pgtest.URL(t))
	s.SetDoubt(time.Hour) // as if the machine ran nothing else before the change below is made
	held, err := s.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback() }()
	if _, err := held.ExecContext(t.Context(), "LOCK TABLE documents IN SHARE MODE"); err != nil {
		t.Fatal(err)
	}
	if err := s.PutDocument(t.Context(), "acme", "x", "y", nil); !fault.Is(err, fault.Unavailable) {
		t.Errorf("the late call: %v", err)
	}
	if !s.Asking() || s.Suspect() {
		t.Errorf("asking: %v, suspect: %v", s.Asking(), s.Suspect())
	}
	if err := s.Insert(t.Context(), record("sb1")); err != nil {
		t.Errorf("a call meanwhile: %v", err)
	}
	if err := held.Rollback(); err != nil {
		t.Fatal(err)
	}
	until(t, "the store stops asking", func() bool { return !s.Asking() })
	if s.Suspect() {
		t.Error("the database is suspect although it answered")
	}
}

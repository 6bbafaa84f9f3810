package session_test

import (
	"context"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
)

func TestLog_ShareOfTenant(t *testing.T) {
	p := newPlace(t)
	p.config.MaxFollowers = 2
	s := p.serve()
	t.Cleanup(s.close)
	if _, _, err := s.Ensure(t.Context(), acme, "k", session.Request{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	following := make(chan struct{})
	for range 2 {
		go func() {
			for _, err := range s.Log(ctx, acme, "k", session.LogQuery{Follow: true}) {
				if err != nil {
					t.Error(err)
				}
				following <- struct{}{}
				<-ctx.Done()
			}
		}()
		<-following
	}
	for _, err := range s.Log(ctx, acme, "k", session.LogQuery{Follow: true}) {
		if !fault.Is(err, fault.Exhausted) {
			t.Errorf("a third stream: %v, want exhausted", err)
		}
		break
	}
	for _, err := range s.Log(ctx, acme, "k", session.LogQuery{}) {
		if err != nil {
			t.Errorf("a reader that does not follow: %v", err)
		}
		break
	}
}

package native_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReady_StoppedMaker stops the maker with a signal: Ready fails soon, and succeeds when the
// maker continues.
func TestReady_StoppedMaker(t *testing.T) {
	m := newMaker(t)
	if err := m.driver.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	pid := m.driver.MakerPID()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var err error
	for err == nil { // a thread of the maker may answer once more before the signal reaches it
		err = m.driver.Ready(ctx)
	}
	if cont := unix.Kill(pid, unix.SIGCONT); cont != nil {
		t.Fatal(cont)
	}
	if err == nil || !strings.HasPrefix(err.Error(), "the maker is stopped") || ctx.Err() != nil {
		t.Errorf("Ready of a stopped maker: %v; its context: %v", err, ctx.Err())
	}
	if err := m.driver.Ready(t.Context()); err != nil {
		t.Errorf("Ready after the maker continued: %v", err)
	}
}

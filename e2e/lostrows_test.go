package e2e_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	domain "github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
)

// A database that lost its last changes, as SQLite does whose log is removed, does not know sandboxes that run.
func TestLostRows(t *testing.T) {
	s := newServer(t)
	database := filepath.Join(s.dir, "server", "cove.db")
	kept := s.create(t, client.CreateRequest{})
	s.signal(t, unix.SIGTERM) // it carries the log into the database
	s.start(t)

	lost := map[string]int{} // the pid of each
	for range 2 {
		sb := s.create(t, client.CreateRequest{})
		lost[sb.ID] = s.initOf(t, sb)
	}
	s.crash(t)
	for _, end := range []string{"-wal", "-shm"} {
		if err := os.Remove(database + end); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	s.start(t)
	for id, pid := range lost {
		eventually(t, "its processes are gone", 2*time.Minute, func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
		if info := s.after(t, id); info.State != "ended" || info.Cause != "record_lost" {
			t.Errorf("it is %+v", info)
		}
		var types []string
		for e, err := range s.Events(t.Context(), client.EventsRequest{Sandbox: id}) {
			if err != nil {
				t.Fatal(err)
			}
			types = append(types, e.Type+" "+e.Cause)
		}
		if got := strings.Join(types, ", "); got != "ended record_lost" {
			t.Errorf("its events are %s", got)
		}
	}
	if said := s.said.String(); strings.Count(said, "sandboxes without a row were ended") != 1 || !strings.Contains(said, "count=2 tenants=1") {
		t.Errorf("the server says:\n%s", said)
	}
	again := &sandbox{t, s.Sandbox(kept.ID)}
	if got := again.sh("echo here"); got != "here" {
		t.Errorf("the sandbox with a row says %q", got)
	}

	t.Run("a sandbox whose end was recorded meanwhile is ended", func(t *testing.T) {
		pid := s.initOf(t, again)
		s.crash(t)
		store, err := sqlstore.Open(database)
		if err != nil {
			t.Fatal(err)
		}
		record, err := store.Get(t.Context(), kept.ID)
		if err != nil {
			t.Fatal(err)
		}
		record.State, record.Cause, record.EndedAt = domain.StateEnded, domain.CauseMakerDied, time.Now()
		if err := errors.Join(store.Save(t.Context(), record), store.Close()); err != nil {
			t.Fatal(err)
		}
		s.start(t)
		eventually(t, "its processes are gone", 2*time.Minute, func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
		if info := s.after(t, kept.ID); info.State != "ended" || info.Cause != "maker_died" {
			t.Errorf("it is %+v", info)
		}
		if said := s.said.String(); !strings.Contains(said, "after their end was recorded were ended") {
			t.Errorf("the server says:\n%s", said)
		}
	})
}

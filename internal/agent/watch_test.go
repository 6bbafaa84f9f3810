package agent_test

import (
	"os"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

// TestWatchOfANameThatIsTakenAnew moves a directory in, whose file is told because it was looked at, moves it away and puts
// another one in its place: its file is a new one.
func TestWatchOfANameThatIsTakenAnew(t *testing.T) {
	put := func(h *home, _ string) error {
		if err := os.Mkdir(h.dir+"/d", 0o755); err != nil {
			return err
		}
		return os.WriteFile(h.dir+"/d/f", nil, 0o644)
	}
	for name, again := range map[string]func(h *home, away string) error{
		"made there": put,
		"moved back": func(h *home, away string) error { return os.Rename(away+"/d", h.dir+"/d") },
	} {
		t.Run(name, func(t *testing.T) {
			h, away := newHome(t, agentapi.Boot{ID: "a"}), t.TempDir()
			if err := put(h, away); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(h.dir+"/d", away+"/d"); err != nil {
				t.Fatal(err)
			}
			told := h.watchSteps(t,
				func() error { return os.Rename(away+"/d", h.dir+"/d") },
				func() error { return os.Rename(h.dir+"/d", away+"/d") },
				func() error { return again(h, away) })
			if got := strings.Join(told, ", "); !strings.HasPrefix(got, "create d, create d/f, rename d, create d, create d/f") || strings.Count(got, "create d/f") != 2 {
				t.Errorf("told: %s", got)
			}
		})
	}
}

// watchSteps is what a watch tells of steps, each of which is taken when all of the one before was told.
func (h *home) watchSteps(t *testing.T, steps ...func() error) (told []string) {
	t.Helper()
	w, err := h.Watch(t.Context(), agentapi.WatchParams{Path: h.dir, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	step := func(n int) {
		if err := steps[n](); err != nil {
			t.Fatal(err)
		}
		if err := w.Control(agentapi.Control{Sync: n + 1}); err != nil {
			t.Fatal(err)
		}
	}
	step(0)
	for e, err := range w.Events() {
		switch {
		case err != nil:
			t.Fatal(err)
		case e.Type == agentapi.EventSynced && e.Count == len(steps):
			return told
		case e.Type == agentapi.EventSynced:
			step(e.Count)
		case e.File != nil:
			told = append(told, e.File.Op+" "+strings.TrimPrefix(e.File.Path, h.dir+"/"))
		}
	}
	t.Fatal("the watch ended")
	return nil
}

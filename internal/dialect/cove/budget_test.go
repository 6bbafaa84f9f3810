package cove_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	b := transfer.NewBudget(0, 0)
	w.Config.Handler = b.Handler(w.api)
	long := strings.Repeat(" ", 100<<10)
	status, body := w.do(t, "POST", "/sandboxes", long+"{}")
	if status != http.StatusTooManyRequests || !strings.Contains(string(body), `"kind":"exhausted"`) {
		t.Errorf("share: %d %s", status, body)
	}
	w.Config.Handler = transfer.NewBudget(0, 1<<20).Handler(w.api)
	status, body = w.do(t, "POST", "/sandboxes", long+"{}")
	if status != http.StatusServiceUnavailable || !strings.Contains(string(body), `"kind":"unavailable"`) {
		t.Errorf("total: %d %s", status, body)
	}
	if status, body := w.do(t, "POST", "/sandboxes", "{}"); status != http.StatusCreated {
		t.Errorf("a short body: %d %s", status, body)
	}
}

func TestBodies_StdinCountsWhileItRuns(t *testing.T) {
	w := newWorld(t)
	b := transfer.NewBudget(1<<30, 1<<30)
	w.Config.Handler = b.Handler(w.api)
	sb := w.sandbox(t)
	const size = 4 << 20
	seen, gate := false, filepath.Join(t.TempDir(), "gate")
	command := "echo begun; until [ -e " + gate + " ]; do sleep 0.01; done; wc -c"
	for e, err := range sb.ExecStream(t.Context(), client.ExecRequest{Command: command, Stdin: strings.Repeat("a", size)}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == client.EventStdout && !seen {
			seen = true
			if used := b.Used(); used < size-transfer.FreeBody {
				t.Errorf("%d bytes are counted while the command runs", used)
			}
			if err := os.WriteFile(gate, nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for deadline := time.Now().Add(10 * time.Second); b.Used() != 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if b.Used() != 0 || !seen {
		t.Errorf("%d bytes are counted after the command; output: %v", b.Used(), seen)
	}
}

func TestBodies_TooManyArguments(t *testing.T) {
	w := newWorld(t)
	sb := w.sandbox(t)
	body := `{"argv":["true"` + strings.Repeat(`,""`, 1<<20) + `]}`
	status, text := w.do(t, "POST", "/sandboxes/"+sb.ID+"/exec", body)
	if status != http.StatusBadRequest || !strings.Contains(string(text), "more than 32768 members") {
		t.Errorf("%d %.200s", status, text)
	}
}

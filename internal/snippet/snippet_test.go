package snippet_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/snippet"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

var acme = auth.Principal{Tenant: "acme"}

type templates struct{}

func (templates) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	return &template.Template{Name: name}, nil
}

// world is a Manager with real agents, which cannot close a network.
type world struct {
	*sandbox.Manager
	runner *snippet.Runner
}

func newWorld(t *testing.T) world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	driver, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	m := sandbox.NewManager(sandbox.Config{DefaultTemplate: "base"}, driver, store, templates{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return world{m, snippet.New(m, log)}
}

// sandboxes are all that there ever were, once nobody is ending one any more.
func (w world) sandboxes(t *testing.T) []sandbox.Sandbox {
	t.Helper()
	if err := w.runner.Close(); err != nil {
		t.Fatal(err)
	}
	page, err := w.List(t.Context(), acme, sandbox.ListQuery{})
	if err != nil {
		t.Fatal(err)
	}
	return page.Items
}

func TestASandboxEndsWithItsSnippet(t *testing.T) {
	for claim, spec := range map[string]snippet.Spec{
		"that succeeds":            {Code: "print(1)", Network: true},
		"that fails":               {Code: "1/0", Network: true},
		"that takes too long":      {Code: "while True: pass", Network: true, Timeout: 300 * time.Millisecond},
		"that was not even begun":  {Code: "1", Network: true, Env: map[string]string{"no=name": ""}},
		"that leaves things going": {Code: "import subprocess; subprocess.Popen(['sleep', '60'])", Network: true},
	} {
		t.Run(claim, func(t *testing.T) {
			w := newWorld(t)
			_, _ = w.runner.Run(t.Context(), acme, spec) // whatever it said
			all := w.sandboxes(t)
			if len(all) != 1 || all[0].State != sandbox.StateEnded || all[0].Cause != sandbox.CauseKilled {
				t.Errorf("there are %+v", all)
			}
		})
	}
}

func TestASandboxEndsWhenTheCallerLeaves(t *testing.T) {
	w := newWorld(t)
	ctx, leave := context.WithCancel(t.Context())
	runs := filepath.Join(t.TempDir(), "runs")
	var watching sync.WaitGroup
	defer watching.Wait()
	defer leave()
	watching.Go(func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(runs); err == nil {
				leave()
			}
			time.Sleep(time.Millisecond)
		}
	})
	_, err := w.runner.Run(ctx, acme, snippet.Spec{Code: fmt.Sprintf("import time; open(%q, 'w'); time.sleep(60)", runs), Network: true, Timeout: time.Minute})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("it ended by %v", err)
	}
	if all := w.sandboxes(t); len(all) != 1 || all[0].State != sandbox.StateEnded {
		t.Errorf("there are %+v", all)
	}
}

func TestALivingSandboxGoesOn(t *testing.T) {
	w := newWorld(t)
	sb, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := w.runner.Run(t.Context(), acme, snippet.Spec{Code: "print('in there')", Sandbox: sb.ID})
	if err != nil || string(r.Stdout) != "in there\n" || r.Sandbox != sb.ID || r.End.Outcome != agentapi.OutcomeOK {
		t.Errorf("it said %+v, %v", r, err)
	}
	if all := w.sandboxes(t); len(all) != 1 || all[0].State != sandbox.StateRunning {
		t.Errorf("there are %+v", all)
	}
	if _, err := w.runner.Run(t.Context(), auth.Principal{Tenant: "other"}, snippet.Spec{Code: "1", Sandbox: sb.ID}); !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant is told %v", err)
	}
}

func TestOutputIsBounded(t *testing.T) {
	w := newWorld(t)
	r, err := w.runner.Run(t.Context(), acme, snippet.Spec{Code: "import sys\nsys.stdout.write('x' * (3 << 20)); sys.stderr.write('end')", Network: true})
	if err != nil || len(r.Stdout) != snippet.MaxOutput || string(r.Stderr) != "end" || !r.Truncated || r.End.Outcome != agentapi.OutcomeOK {
		t.Errorf("it said %d bytes and %q, truncated %v, ended %+v, %v", len(r.Stdout), r.Stderr, r.Truncated, r.End, err)
	}
}

func TestWhatCannotBeRunIsRefusedBeforeThereIsASandbox(t *testing.T) {
	w := newWorld(t)
	for claim, spec := range map[string]snippet.Spec{
		"too much code":           {Code: strings.Repeat("#", snippet.MaxCode+1)},
		"no text":                 {Code: "print('\xff')"},
		"a negative time":         {Timeout: -1},
		"more time than a day":    {Timeout: snippet.MaxTimeout + 1},
		"a negative limit":        {Limits: agentapi.RunLimits{OpenFiles: -1}},
		"a template for a living": {Sandbox: "a", Template: "python"},
		"a network for a living":  {Sandbox: "a", Network: true},
	} {
		if _, err := w.runner.Run(t.Context(), acme, spec); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", claim, err)
		}
	}
	if all := w.sandboxes(t); len(all) != 0 {
		t.Errorf("there are %+v", all)
	}
}

func TestADriverThatCannotCloseTheNetworkRunsNothingThatWantsItClosed(t *testing.T) {
	w := newWorld(t)
	if _, err := w.runner.Run(t.Context(), acme, snippet.Spec{Code: "1"}); !fault.Is(err, fault.Unsupported) {
		t.Errorf("it says %v", err)
	}
}

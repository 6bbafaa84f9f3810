package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// claims runs each claim in a bubble of its own: time is false, and a goroutine that outlives the server fails the test.
func claims(t *testing.T, cfg sandbox.Config, all map[string]func(t *testing.T, w *world)) {
	for name, claim := range all {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { claim(t, newWorld(t, cfg)) })
		})
	}
}

var errBoom = errors.New("boom")

func TestCreate(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"what is left out is decided by template and server": func(t *testing.T, w *world) {
			got := w.create(sandbox.Spec{})
			want := sandbox.Sandbox{
				ID: got.ID, Tenant: "acme", Template: "python", TemplateDigest: "sha256:py", State: sandbox.StateRunning,
				CreatedAt: time.Now().UTC(), StartedAt: time.Now().UTC(), LastUsed: time.Now().UTC(), Deadline: time.Now().Add(300 * time.Second).UTC(),
				Limits:  template.Limits{CPUs: 1, MemoryBytes: 1 << 30, Pids: 256, DiskBytes: 2 << 30, OpenFiles: 1024},
				Network: policy.Network{Mode: policy.Internet}, Storage: sandbox.StorageVolatile, IdleAction: sandbox.IdleKill,
				DeadlineAction: sandbox.IdleKill,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(want, w.get(got.ID)); diff != "" {
				t.Fatal(diff)
			}
			req := w.driver.requests[0]
			if req.ID != got.ID || req.Tenant != "acme" || !req.Deadline.Equal(want.Deadline) || req.Limits != want.Limits || req.Template.Name != "python" {
				t.Fatalf("the driver was asked for %+v", req)
			}
		},
		"what is asked for is given": func(t *testing.T, w *world) {
			spec := sandbox.Spec{
				Template: "base", Key: "k", Lifetime: -1, IdleTimeout: time.Minute, Limits: template.Limits{CPUs: 0.5, MemoryBytes: 64 << 20},
				Metadata: map[string]string{"a": "b"}, Env: map[string]string{"A": "1"}, Network: &policy.Network{Mode: policy.None}, Storage: sandbox.StorageTmpfs,
				IdleAction: sandbox.IdlePause, AutoResume: true, Annotations: map[string]string{"e2b": "{}"},
				DeadlineAction: sandbox.IdlePause, ColdPause: true, ResumeLifetime: time.Hour,
			}
			got := w.create(spec)
			want := sandbox.Sandbox{
				ID: got.ID, Tenant: "acme", Template: "base", TemplateDigest: "sha256:base", Key: "k", State: sandbox.StateRunning,
				CreatedAt: time.Now().UTC(), StartedAt: time.Now().UTC(), LastUsed: time.Now().UTC(), IdleTimeout: time.Minute,
				Limits:   template.Limits{CPUs: 0.5, MemoryBytes: 64 << 20, Pids: 256, DiskBytes: 2 << 30, OpenFiles: 1024},
				Metadata: map[string]string{"a": "b"}, Network: policy.Network{Mode: policy.None}, Storage: sandbox.StorageTmpfs,
				IdleAction: sandbox.IdlePause, AutoResume: true, Annotations: map[string]string{"e2b": "{}"},
				DeadlineAction: sandbox.IdlePause, ColdPause: true, ResumeLifetime: time.Hour,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(spec.Env, w.driver.requests[0].Env); diff != "" {
				t.Fatal(diff)
			}
		},
		"an id is a DNS label that cannot be guessed": func(t *testing.T, w *world) {
			seen := map[string]bool{}
			for range 20 {
				id := w.create(sandbox.Spec{}).ID
				if !regexp.MustCompile(`^[a-z][a-z0-9]{25,39}$`).MatchString(id) || seen[id] {
					t.Fatalf("id is %q", id)
				}
				seen[id] = true
			}
		},
		"one create writes once": func(t *testing.T, w *world) {
			sb := w.create(sandbox.Spec{})
			if inserts, saves := w.store.count("insert"), w.store.count("save running"); inserts != 1 || saves != 0 {
				t.Fatalf("%d inserts and %d saves, want 1 and none", inserts, saves)
			}
			if row, err := w.store.Get(t.Context(), sb.ID); err != nil || row.State != sandbox.StateRunning || !row.StartedAt.Equal(sb.StartedAt) {
				t.Fatalf("the row is %s since %v, not running since %v: %v", row.State, row.StartedAt, sb.StartedAt, err)
			}
		},
		"a start that takes its time is recorded before it is over": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			done := make(chan sandbox.Sandbox, 1)
			go func() {
				sb, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
				if err != nil {
					t.Error(err)
				}
				done <- sb
			}()
			time.Sleep(time.Second / 2)
			if all := w.all(); len(all) != 1 || all[0].State != sandbox.StateStarting {
				t.Fatalf("half way there is %+v, not one that starts", all)
			}
			sb := <-done
			if inserts, saves := w.store.count("insert"), w.store.count("save running"); inserts != 1 || saves != 1 {
				t.Fatalf("%d inserts and %d saves, want one of each", inserts, saves)
			}
			want := []sandbox.LifecycleType{sandbox.LifecycleCreated, sandbox.LifecycleStarted}
			if diff := cmp.Diff(want, w.events(sandbox.EventQuery{Sandbox: sb.ID})); diff != "" {
				t.Fatal(diff)
			}
		},
		"a caller without a tenant is not known": func(t *testing.T, w *world) {
			_, _, err := w.Create(t.Context(), auth.Principal{}, sandbox.Spec{})
			wantKind(t, err, fault.Unauthed)
		},
		"another tenant's sandbox is not found": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.Get(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			_, err = w.Kill(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			_, err = w.SetLifetime(t.Context(), globex, id, time.Hour)
			wantKind(t, err, fault.NotFound)
			_, err = w.Agent(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			_, err = w.Usage(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			_, err = w.Get(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			_, err = w.Get(t.Context(), auth.Principal{}, id)
			wantKind(t, err, fault.NotFound)
		},
	})
}

func TestCreateRefuses(t *testing.T) {
	many := func(n int, v string) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprintf("K%d", i)] = v
		}
		return m
	}
	cfg := sandbox.Config{MaxLifetime: time.Hour, MaxLimits: template.Limits{CPUs: 2, MemoryBytes: 1 << 30, Pids: 512, DiskBytes: 4 << 30, OpenFiles: 4096}}
	for name, c := range map[string]struct {
		spec sandbox.Spec
		kind fault.Kind
		says string
	}{
		"an unknown template":        {sandbox.Spec{Template: "nope"}, fault.NotFound, "nope"},
		"a template name with a NUL": {sandbox.Spec{Template: "a\x00"}, fault.Invalid, "template"},
		"negative CPUs":              {sandbox.Spec{Limits: template.Limits{CPUs: -1}}, fault.Invalid, "cpus cannot be negative"},
		"CPUs that are no number":    {sandbox.Spec{Limits: template.Limits{CPUs: math.NaN()}}, fault.Invalid, "not a number"},
		"more CPUs than allowed":     {sandbox.Spec{Limits: template.Limits{CPUs: 3}}, fault.Invalid, "more than the 2"},
		"too little memory":          {sandbox.Spec{Limits: template.Limits{MemoryBytes: 1 << 20}}, fault.Invalid, "memory"},
		"too much memory":            {sandbox.Spec{Limits: template.Limits{MemoryBytes: 2 << 30}}, fault.Invalid, "memory"},
		"too few pids":               {sandbox.Spec{Limits: template.Limits{Pids: 1}}, fault.Invalid, "pids"},
		"too little disk":            {sandbox.Spec{Limits: template.Limits{DiskBytes: 1}}, fault.Invalid, "disk"},
		"negative open files":        {sandbox.Spec{Limits: template.Limits{OpenFiles: -5}}, fault.Invalid, "open files"},
		"a lifetime too long":        {sandbox.Spec{Lifetime: 2 * time.Hour}, fault.Invalid, "longer than the 1h0m0s"},
		"no deadline":                {sandbox.Spec{Lifetime: -1}, fault.Invalid, "without a deadline"},
		"too much metadata":          {sandbox.Spec{Metadata: many(65, "")}, fault.Invalid, "65 keys"},
		"an empty metadata key":      {sandbox.Spec{Metadata: map[string]string{"": "x"}}, fault.Invalid, "empty key"},
		"a long metadata key":        {sandbox.Spec{Metadata: map[string]string{strings.Repeat("k", 129): ""}}, fault.Invalid, "too long"},
		"a long metadata value":      {sandbox.Spec{Metadata: map[string]string{"k": strings.Repeat("v", 1025)}}, fault.Invalid, "1025 characters"},
		"metadata that is not UTF-8": {sandbox.Spec{Metadata: map[string]string{"k": "\xff"}}, fault.Invalid, "UTF-8"},
		"too many variables":         {sandbox.Spec{Env: many(257, "")}, fault.Invalid, "257 variables"},
		"too long an environment":    {sandbox.Spec{Env: many(40, strings.Repeat("v", 1000))}, fault.Invalid, "bytes"},
		"a variable with an equals":  {sandbox.Spec{Env: map[string]string{"A=B": ""}}, fault.Invalid, "A=B"},
		"a variable with a NUL":      {sandbox.Spec{Env: map[string]string{"A": "\x00"}}, fault.Invalid, "not text"},
		"a long key":                 {sandbox.Spec{Key: strings.Repeat("k", 129)}, fault.Invalid, "key"},
		"a long idempotency key":     {sandbox.Spec{IdempotencyKey: strings.Repeat("k", 256)}, fault.Invalid, "idempotency key"},
		"an unknown storage":         {sandbox.Spec{Storage: "floppy"}, fault.Invalid, "floppy"},
		"an unknown network mode":    {sandbox.Spec{Network: &policy.Network{Mode: "lan"}}, fault.Invalid, "lan"},
		"an empty list network":      {sandbox.Spec{Network: &policy.Network{Mode: policy.List}}, fault.Invalid, "allow list"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, cfg)
				_, _, err := w.Create(t.Context(), acme, c.spec)
				wantKind(t, err, c.kind)
				if !strings.Contains(fault.Message(err), c.says) {
					t.Fatalf("the sentence is %q", fault.Message(err))
				}
				if w.store.count("insert")+w.driver.count("start") != 0 {
					t.Fatal("a refused create reached store or driver")
				}
			})
		})
	}
}

func TestDefaultsYieldToMaximum(t *testing.T) {
	claims(t, sandbox.Config{MaxLimits: template.Limits{MemoryBytes: 600 << 20, Pids: 300}}, map[string]func(*testing.T, *world){
		"a template's default is lowered to the maximum": func(t *testing.T, w *world) {
			if got := w.create(sandbox.Spec{}).Limits; got.MemoryBytes != 600<<20 || got.Pids != 256 {
				t.Fatalf("limits are %+v", got)
			}
		},
		"pids and open files have a maximum where none is given": func(t *testing.T, w *world) {
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Limits: template.Limits{OpenFiles: 65537}})
			if wantKind(t, err, fault.Invalid); !strings.Contains(fault.Message(err), "more than the 65536") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			if err := (sandbox.Config{DefaultLimits: template.Limits{Pids: 4097}}).Validate(); !fault.Is(err, fault.Invalid) {
				t.Fatalf("error is %v", err)
			}
		},
		"a network that the driver cannot keep is refused": func(t *testing.T, w *world) {
			w.driver.caps.Network = false
			deny := []netip.Prefix{netip.MustParsePrefix("1.1.1.1/32")}
			for _, n := range []policy.Network{{Mode: policy.None}, {Mode: policy.Internet, Deny: deny}} {
				_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Network: &n})
				wantKind(t, err, fault.Unsupported)
			}
			w.create(sandbox.Spec{Network: &policy.Network{Mode: policy.Internet}})
		},
	})
}

// shared creates n times at once and returns the ids with how many were new.
func shared(t *testing.T, w *world, n int, spec sandbox.Spec) (ids map[string]int, made int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids = map[string]int{}
	for range n {
		wg.Go(func() {
			sb, created, err := w.Create(t.Context(), acme, spec)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			ids[sb.ID]++
			if created {
				made++
			}
		})
	}
	wg.Wait()
	return ids, made
}

// slow makes starts take a second.
func slow(ctx context.Context, _ sandbox.StartRequest) error {
	select {
	case <-time.After(time.Second):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestKeys(t *testing.T) {
	specs := map[string]sandbox.Spec{"a key": {Key: "k"}, "an idempotency key": {IdempotencyKey: "k", Metadata: map[string]string{"a": "b"}}}
	for name, spec := range specs {
		claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
			"concurrent creates of " + name + " share one sandbox": func(t *testing.T, w *world) {
				w.driver.onStart = slow
				ids, made := shared(t, w, 20, spec)
				if len(ids) != 1 || made != 1 || w.driver.size() != 1 {
					t.Fatalf("%d sandboxes, %d made", len(ids), made)
				}
			},
			"a later create of " + name + " finds the living sandbox": func(t *testing.T, w *world) {
				first := w.create(spec)
				again, created, err := w.Create(t.Context(), acme, spec)
				if err != nil || created || again.ID != first.ID {
					t.Fatalf("got %s created %v, %v; want %s", again.ID, created, err, first.ID)
				}
			},
			"a create of " + name + " after the end makes another": func(t *testing.T, w *world) {
				first := w.create(spec)
				if _, err := w.Kill(t.Context(), acme, first.ID); err != nil {
					t.Fatal(err)
				}
				if w.create(spec).ID == first.ID {
					t.Fatal("the ended sandbox came back")
				}
			},
			"a create of " + name + " during the end waits and makes another": func(t *testing.T, w *world) {
				first := w.create(spec)
				w.driver.onStop = func(string) { time.Sleep(time.Second) }
				go w.Kill(t.Context(), acme, first.ID)
				time.Sleep(time.Millisecond)
				if w.create(spec).ID == first.ID {
					t.Fatal("the ending sandbox was given out")
				}
			},
			"another tenant's " + name + " is another sandbox": func(t *testing.T, w *world) {
				first := w.create(spec)
				sb, created, err := w.Create(t.Context(), globex, spec)
				if err != nil || !created || sb.ID == first.ID {
					t.Fatalf("created %v, %v", created, err)
				}
			},
			"the next server knows " + name: func(t *testing.T, w *world) {
				first := w.create(spec)
				w.restart()
				again, created, err := w.Create(t.Context(), acme, spec)
				if err != nil || created || again.ID != first.ID {
					t.Fatalf("got %s created %v, %v; want %s", again.ID, created, err, first.ID)
				}
			},
			"when the first caller of " + name + " leaves, those who wait get a sandbox all the same": func(t *testing.T, w *world) {
				w.driver.onStart = slow
				ctx, leave := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, _, err := w.Create(ctx, acme, spec); err == nil {
						t.Error("a create whose caller left succeeded")
					}
				})
				synctest.Wait()
				wg.Go(func() {
					if ids, made := shared(t, w, 5, spec); len(ids) != 1 || made != 1 {
						t.Errorf("%d sandboxes, %d made", len(ids), made)
					}
				})
				synctest.Wait()
				leave()
				wg.Wait()
				if w.driver.size() != 1 {
					t.Errorf("%d sandboxes live, want 1", w.driver.size())
				}
			},
			"when the start of " + name + " fails, all who share it hear why": func(t *testing.T, w *world) {
				w.driver.onStart = func(ctx context.Context, req sandbox.StartRequest) error {
					_ = slow(ctx, req)
					return fault.New(fault.Exhausted, "no memory left on this host")
				}
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						if _, _, err := w.Create(t.Context(), acme, spec); !fault.Is(err, fault.Exhausted) {
							t.Errorf("error is %v", err)
						}
					})
				}
				wg.Wait()
				if n := w.driver.count("start"); n != 1 {
					t.Errorf("%d starts, want 1", n)
				}
			},
		})
	}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"an idempotency key with a different spec is a conflict": func(t *testing.T, w *world) {
			w.create(sandbox.Spec{IdempotencyKey: "k", Env: map[string]string{"A": "1"}})
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{IdempotencyKey: "k", Env: map[string]string{"A": "2"}})
			wantKind(t, err, fault.Conflict)
			w.restart()
			_, _, err = w.Create(t.Context(), acme, sandbox.Spec{IdempotencyKey: "k", Env: map[string]string{"A": "2"}})
			wantKind(t, err, fault.Conflict)
		},
	})
}

func TestLimitsPerTenant(t *testing.T) {
	claims(t, sandbox.Config{MaxPerTenant: 2}, map[string]func(*testing.T, *world){
		"a tenant has so many living sandboxes and no more": func(t *testing.T, w *world) {
			first := w.create(sandbox.Spec{Key: "k"})
			w.create(sandbox.Spec{})
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Exhausted)
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{Key: "k"}); err != nil {
				t.Fatalf("one that lives is not found at the limit: %v", err)
			}
			if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
				t.Fatalf("another tenant is held back: %v", err)
			}
			w.restart()
			_, _, err = w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Exhausted)
			if _, err := w.Kill(t.Context(), acme, first.ID); err != nil {
				t.Fatal(err)
			}
			w.create(sandbox.Spec{})
		},
		"a start that failed gives its place back": func(t *testing.T, w *world) {
			w.driver.failWith(failing("start", 3, errBoom))
			for range 3 {
				if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); err == nil {
					t.Fatal("started")
				}
			}
			w.create(sandbox.Spec{})
			w.create(sandbox.Spec{})
		},
	})
	claims(t, sandbox.Config{CreateRate: 2}, map[string]func(*testing.T, *world){
		"a tenant creates so many per second and no more": func(t *testing.T, w *world) {
			w.create(sandbox.Spec{})
			w.create(sandbox.Spec{})
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Exhausted)
			if !strings.Contains(fault.Message(err), "500ms") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
				t.Fatalf("another tenant is held back: %v", err)
			}
			time.Sleep(500 * time.Millisecond)
			w.create(sandbox.Spec{})
		},
	})
	claims(t, sandbox.Config{MaxStarting: 1, MaxQueued: 1}, map[string]func(*testing.T, *world){
		"creates queue, and are turned away when the queue is full": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); err != nil {
						t.Error(err)
					}
				})
			}
			synctest.Wait()
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Unavailable)
			wg.Wait()
			if n := len(w.all()); n != 2 {
				t.Fatalf("%d sandboxes are listed, want 2", n)
			}
		},
		"whoever leaves the queue leaves its place to another": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			var wg sync.WaitGroup
			create := func(ctx context.Context, want fault.Kind) {
				wg.Go(func() {
					if _, _, err := w.Create(ctx, acme, sandbox.Spec{}); (err == nil) != (want == "") || err != nil && !fault.Is(err, want) {
						t.Errorf("error is %v, want %q", err, want)
					}
				})
				synctest.Wait()
			}
			ctx, leave := context.WithCancel(t.Context())
			create(t.Context(), "")
			create(ctx, fault.Unavailable)
			leave()
			synctest.Wait()
			create(t.Context(), "")
			wg.Wait()
		},
	})
	claims(t, sandbox.Config{MaxStarting: 1, MaxQueued: 4}, map[string]func(*testing.T, *world){
		"tenants take turns, and one that fills the queue yields its last place": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			var mu sync.Mutex
			var wg sync.WaitGroup
			var order []string
			refused := 0
			create := func(p auth.Principal) {
				wg.Go(func() {
					_, _, err := w.Create(t.Context(), p, sandbox.Spec{})
					mu.Lock()
					defer mu.Unlock()
					if fault.Is(err, fault.Unavailable) {
						refused++
					} else if order = append(order, p.Tenant); err != nil {
						t.Error(err)
					}
				})
				synctest.Wait()
			}
			for range 5 { // one starts, four wait
				create(acme)
			}
			create(globex)
			create(globex)
			create(globex) // has as many as acme now
			wg.Wait()
			want := []string{"acme", "acme", "globex", "acme", "globex"}
			if diff := cmp.Diff(want, order); diff != "" || refused != 3 {
				t.Fatalf("%d turned away: %s", refused, diff)
			}
		},
	})
}

func TestSlowStarts(t *testing.T) {
	claims(t, sandbox.Config{MaxStarting: 4, MaxQueued: 100}, map[string]func(*testing.T, *world){
		"one tenant's starts that take long leave room for another's": func(t *testing.T, w *world) {
			slots := make(chan struct{})
			w.driver.onStart = func(_ context.Context, req sandbox.StartRequest) error {
				if req.Tenant == acme.Tenant {
					<-slots
				}
				return nil
			}
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); err != nil {
						t.Error(err)
					}
				})
			}
			synctest.Wait()
			if n := w.driver.count("start"); n != 3 {
				t.Errorf("%d of one tenant's start at once", n)
			}
			for range 5 {
				if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
					t.Error(err)
				}
			}
			close(slots)
			wg.Wait()
			if n := w.driver.count("start"); n != 15 {
				t.Errorf("%d starts", n)
			}
		},
	})
}

func TestFailedCreate(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a driver that fails leaves a recorded end and nothing else": func(t *testing.T, w *world) {
			w.driver.failWith(failing("start", 1, fault.New(fault.Exhausted, "no memory left on this host")))
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Key: "k"})
			wantKind(t, err, fault.Exhausted)
			sb := w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
			if sb.CauseMessage != "no memory left on this host" || w.observer.failed != 1 || w.driver.count("stop") != 1 {
				t.Fatalf("message %q, %d failed, %d stops", sb.CauseMessage, w.observer.failed, w.driver.count("stop"))
			}
			w.create(sandbox.Spec{Key: "k"})
		},
		"a caller who leaves during the start leaves nothing behind": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_, _, err := w.Create(ctx, acme, sandbox.Spec{})
			wantKind(t, err, fault.Timeout)
			w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
		},
		"a caller who leaves a driver that does not notice leaves nothing behind": func(t *testing.T, w *world) {
			w.driver.onStart = func(context.Context, sandbox.StartRequest) error { time.Sleep(time.Second); return nil }
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_, _, err := w.Create(ctx, acme, sandbox.Spec{})
			wantKind(t, err, fault.Timeout)
			w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
		},
		"a start that hangs is given up, says so and leaves nothing behind": func(t *testing.T, w *world) {
			w.driver.onStart = func(ctx context.Context, _ sandbox.StartRequest) error { <-ctx.Done(); return ctx.Err() }
			begun := time.Now()
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Unavailable)
			if took := time.Since(begun); took != time.Minute || !strings.Contains(fault.Message(err), "did not start within 1m0s") {
				t.Fatalf("after %v: %q", took, fault.Message(err))
			}
			if sb := w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail); sb.CauseMessage != fault.Message(err) {
				t.Fatalf("the cause is %q", sb.CauseMessage)
			}
		},
		"a start that the driver ends itself says why": func(t *testing.T, w *world) {
			w.driver.onStart = func(_ context.Context, r sandbox.StartRequest) error {
				w.driver.die(sandbox.Ended{ID: r.ID, Cause: sandbox.CauseStartFail, Message: "the host is too busy", At: time.Now()})
				synctest.Wait() // the Manager has heard
				return fault.New(fault.Unavailable, "the host is too busy")
			}
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Unavailable)
			if sb := w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail); sb.CauseMessage != "the host is too busy" {
				t.Fatalf("the cause is %q", sb.CauseMessage)
			}
		},
		"a row that cannot be inserted leaves nothing": func(t *testing.T, w *world) {
			w.store.failWith(failing("insert", 1, errBoom))
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{Key: "k"}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			synctest.Wait()
			if w.driver.size() != 0 || w.driver.remembered() != 0 || len(w.all()) != 0 {
				t.Fatal("something is left or recorded")
			}
			w.create(sandbox.Spec{Key: "k"})
		},
		"a row that cannot be inserted ends a start that takes its time": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			w.store.failWith(failing("insert", 1, errBoom))
			begun := time.Now()
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{Key: "k"}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			if took := time.Since(begun); took >= time.Second {
				t.Fatalf("it took %v, as long as the start", took)
			}
			synctest.Wait()
			if w.driver.size() != 0 || w.driver.remembered() != 0 || len(w.all()) != 0 {
				t.Fatal("something is left or recorded")
			}
			w.create(sandbox.Spec{Key: "k"})
		},
		"what could not be recorded and cannot be stopped at once is stopped later": func(t *testing.T, w *world) {
			w.driver.failWith(failing("stop", 2, errBoom))
			w.store.failWith(failing("insert", 1, errBoom))
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			if w.driver.size() != 1 {
				t.Fatalf("%d live, want the one that cannot be stopped", w.driver.size())
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if w.driver.size() != 0 || len(w.all()) != 0 {
				t.Fatalf("%d live and %d rows, want none", w.driver.size(), len(w.all()))
			}
		},
		"a start that cannot be recorded is undone": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			w.store.failWith(failing("save running", 1, errBoom))
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
		},
		"a failed start that cannot be stopped at once is stopped later": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			w.driver.failWith(failing("stop", 2, errBoom))
			w.store.failWith(failing("save running", 1, errBoom))
			if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			time.Sleep(time.Minute)
			w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
		},
		"a sandbox killed while it starts ends as killed": func(t *testing.T, w *world) {
			for _, after := range []time.Duration{0, time.Second / 2} { // before there is a row of it, and when there is one
				var id string
				w.driver.onStart = func(ctx context.Context, req sandbox.StartRequest) error { id = req.ID; return slow(ctx, req) }
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); !fault.Is(err, fault.Gone) {
						t.Errorf("error is %v", err)
					}
				})
				time.Sleep(after)
				synctest.Wait()
				_, err := w.Agent(t.Context(), acme, id)
				wantKind(t, err, fault.Conflict)
				if sb, err := w.Kill(t.Context(), acme, id); err != nil || sb.Cause != sandbox.CauseKilled {
					t.Errorf("kill: %s, %v", sb.Cause, err)
				}
				wg.Wait()
				w.wantEnded(id, sandbox.CauseKilled)
			}
		},
		"a sandbox that dies while it starts tells why": func(t *testing.T, w *world) {
			w.driver.onStart = func(ctx context.Context, req sandbox.StartRequest) error {
				w.driver.die(sandbox.Ended{ID: req.ID, Cause: sandbox.CauseOOM, Message: "python3", At: time.Now()})
				return slow(ctx, req)
			}
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Gone)
			w.wantEnded(w.all()[0].ID, sandbox.CauseOOM)
		},
		"a deadline that passes during the start ends it": func(t *testing.T, w *world) {
			w.driver.onStart = slow
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Lifetime: 100 * time.Millisecond})
			wantKind(t, err, fault.Gone)
			w.wantEnded(w.all()[0].ID, sandbox.CauseExpired)
		},
		"a server that closes ends the starts it waits for": func(t *testing.T, w *world) {
			w.driver.onStart = func(ctx context.Context, _ sandbox.StartRequest) error { <-ctx.Done(); return ctx.Err() }
			var wg sync.WaitGroup
			wg.Go(func() {
				if _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); !fault.Is(err, fault.Unavailable) {
					t.Errorf("error is %v", err)
				}
			})
			synctest.Wait()
			w.Manager.Close()
			wg.Wait()
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Unavailable)
			w.serve()
			w.wantEnded(w.all()[0].ID, sandbox.CauseStartFail)
		},
	})
}

func TestStartFailure(t *testing.T) {
	for want, err := range map[string]error{
		"the kernel did not start":                           fault.New(fault.Timeout, "the kernel did not start"),
		"its caller left while it was starting":              fmt.Errorf("start: %w", context.Canceled),
		"it did not start in time":                           fmt.Errorf("start: %w", context.DeadlineExceeded),
		"it could not be started; the server's log says why": errBoom,
	} {
		if got := sandbox.StartFailure(err); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
	maker := fault.Wrap(fault.Internal, errBoom, "internal error") // as an internal error comes from a maker
	if got := sandbox.StartFailure(maker); got != "it could not be started; the server's log says why" {
		t.Errorf("a failure of the maker: %q", got)
	}
}

func TestCreate_DiskFull(t *testing.T) {
	var full atomic.Bool
	w := newWorld(t, sandbox.Config{Space: func(int64) error {
		if full.Load() {
			return fault.New(fault.DiskFull, "the server's disk is full")
		}
		return nil
	}})
	tmpfs := sandbox.Spec{Storage: sandbox.StorageTmpfs, Key: "kept"}
	kept := w.create(tmpfs)
	written := w.store.count("insert")
	full.Store(true)
	for what, ask := range map[string]func() error{
		"a create": func() error { _, _, err := w.Create(t.Context(), acme, sandbox.Spec{}); return err },
		"a create in memory": func() error {
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Storage: sandbox.StorageTmpfs})
			return err
		},
		"a fork": func() error {
			_, err := w.Fork(t.Context(), acme, kept.ID, sandbox.ForkSpec{Count: 2})
			return err
		},
		"metadata": func() error {
			_, err := w.SetMetadata(t.Context(), acme, kept.ID, func(map[string]string) (map[string]string, error) {
				return map[string]string{"a": "b"}, nil
			})
			return err
		},
	} {
		if err := ask(); !fault.Is(err, fault.DiskFull) {
			t.Errorf("%s: %v, want %s", what, err, fault.DiskFull)
		}
	}
	if n := w.store.count("insert") - written; n != 0 || len(w.all()) != 1 {
		t.Errorf("%d rows were written, and there are %d sandboxes, want 0 and 1", n, len(w.all()))
	}
	if sb, created, err := w.Create(t.Context(), acme, tmpfs); err != nil || created || sb.ID != kept.ID {
		t.Errorf("a create that means the living one: %s, %v, %v", sb.ID, created, err)
	}
	if _, err := w.Kill(t.Context(), acme, kept.ID); err != nil {
		t.Fatal(err)
	}
	w.wantEnded(kept.ID, sandbox.CauseKilled)
	full.Store(false)
	w.create(sandbox.Spec{})
}

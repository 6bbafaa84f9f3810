package chaos_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/testserver"
)

// patience is how long one request of a test may take before it counts as an answer that never came. It is far beyond
// every limit of the server, so that a busy machine does not reach it.
const patience = 60 * time.Second

// status names what a client saw.
func status(err error) string {
	var e *client.Error
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e) && e.Status != 0:
		return fmt.Sprint(e.Status)
	case errors.As(err, &e):
		return "stream-" + string(e.Kind)
	case errors.Is(err, context.DeadlineExceeded):
		return "never"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	default:
		return "cut"
	}
}

// saw counts an answer.
func (f *fault) saw(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.row.Clients[what]++
}

// ask does one request and counts its answer.
func (f *fault) ask(do func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	err := do(ctx)
	f.saw(status(err))
	return err
}

// onlySaw fails if clients saw anything but these statuses.
func (f *fault) onlySaw(allowed ...string) {
	f.Helper()
	f.mu.Lock()
	var bad []string
	for what, n := range f.row.Clients {
		if !slices.Contains(allowed, what) {
			bad = append(bad, fmt.Sprintf("%d × %s", n, what))
		}
	}
	f.mu.Unlock()
	if len(bad) > 0 {
		f.Errorf("clients saw %s; allowed are %s", strings.Join(bad, ", "), strings.Join(allowed, ", "))
	}
}

// crowd is clients that make, use and end sandboxes until they are told to stop.
type crowd struct {
	stop chan struct{}
	wg   sync.WaitGroup
	f    *fault
	once sync.Once
	said sync.Map // status -> first error
}

// workload starts n clients of the server. While it is away they try its last address.
func (f *fault) workload(s *testserver.Server, n int) *crowd {
	c := &crowd{stop: make(chan struct{}), f: f}
	api := s.Client
	for i := range n {
		c.wg.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-c.stop:
					return
				default:
				}
				if err := c.cycle(api, i*1000+k); err != nil {
					c.said.LoadOrStore(status(err), err.Error())
					time.Sleep(50 * time.Millisecond) // the pace of a client that tries again
				}
			}
		})
	}
	f.Cleanup(c.end)
	return c
}

// end stops the clients and waits for them.
func (c *crowd) end() {
	c.once.Do(func() {
		close(c.stop)
		c.wg.Wait()
		c.said.Range(func(what, first any) bool {
			c.f.note("the first %v: %.200v", what, first)
			return true
		})
	})
}

// cycle is one sandbox's whole life. An answer with wrong content fails the fault whatever else is allowed.
func (c *crowd) cycle(api *client.Client, k int) error {
	var sb *client.Sandbox
	err := c.f.ask(func(ctx context.Context) (err error) {
		sb, err = api.Create(ctx, client.CreateRequest{TimeoutSeconds: 120})
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = c.f.ask(sb.Kill) }()
	if err := c.f.ask(func(ctx context.Context) error { return wants(ctx, sb, fmt.Sprintf("%d * 2", k), fmt.Sprint(2*k)) }); err != nil {
		if errors.Is(err, errWrong) {
			c.f.Errorf("a client got a wrong answer: %v", err)
		}
		return err
	}
	return c.f.ask(func(ctx context.Context) error {
		_, err := sb.Files().WriteBytes(ctx, "note", []byte("text"))
		return err
	})
}

var errWrong = errors.New("wrong value")

// wants runs a cell that must have a value.
func wants(ctx context.Context, sb *client.Sandbox, code, value string) error {
	out, err := sb.Run(ctx, client.RunRequest{Code: code})
	if err != nil {
		return err
	}
	if out.Outcome == client.OutcomeOK && out.Text() != value {
		return fmt.Errorf("%w: %s is %q, want %q", errWrong, code, out.Text(), value)
	}
	if out.Outcome != client.OutcomeOK {
		return &client.Error{Kind: "run-" + client.Kind(out.Outcome), Message: fmt.Sprintf("%s %s %+v", out.Outcome, out.Message, out.Error)}
	}
	return nil
}

// resident is a sandbox that lives through the fault.
type resident struct {
	id, secret, sum string
	api             *client.Client // of its tenant; nil: the server's own, which is another after a restart
}

// in is the resident as a client has it.
func (r resident) in(s *testserver.Server) *client.Sandbox {
	if r.api != nil {
		return r.api.Sandbox(r.id)
	}
	return s.Sandbox(r.id)
}

// settle makes residents: each with a variable, a file of random bytes and a process.
func (f *fault) settle(s *testserver.Server, n int, req client.CreateRequest) (all []resident) {
	f.Helper()
	return f.settleOf(s.Client, n, req)
}

// settleOf makes residents of the tenant that a client has the key of.
func (f *fault) settleOf(s *client.Client, n int, req client.CreateRequest) (all []resident) {
	f.Helper()
	if req.TimeoutSeconds == 0 {
		req.TimeoutSeconds = 3600
	}
	for range n {
		ctx, cancel := context.WithTimeout(f.Context(), patience)
		defer cancel()
		sb, err := s.Create(ctx, req)
		if err != nil {
			f.Fatalf("create a sandbox before the fault: %v", err)
		}
		r := resident{id: sb.ID, secret: rand.Text()}
		content := make([]byte, 1<<20)
		_, _ = rand.Read(content)
		r.sum = fmt.Sprintf("%x", sha256.Sum256(content))
		if err := wants(ctx, sb, fmt.Sprintf("kept = %q; kept", r.secret), fmt.Sprintf("'%s'", r.secret)); err != nil {
			f.Fatalf("a cell before the fault: %v", err)
		}
		if _, err := sb.Files().WriteBytes(ctx, "kept", content); err != nil {
			f.Fatalf("a file before the fault: %v", err)
		}
		if out, err := sb.Exec(ctx, client.ExecRequest{Command: "sync kept; nohup sleep 54321 >/dev/null 2>&1 &"}); err != nil || out.Outcome != client.OutcomeOK {
			f.Fatalf("a process before the fault: %v %+v", err, out)
		}
		all = append(all, r)
	}
	return all
}

// stillThere checks that residents have all that they had.
func (f *fault) stillThere(s *testserver.Server, all []resident) {
	f.Helper()
	for _, r := range all {
		sb := r.in(s)
		ctx, cancel := context.WithTimeout(f.Context(), patience)
		defer cancel()
		if err := f.ask(func(ctx context.Context) error { return wants(ctx, sb, "kept", "'"+r.secret+"'") }); err != nil {
			f.lost("the variable of %s: %v", r.id, err)
			continue
		}
		// Past the sandbox's cache: only that shows what is on the host's disk.
		out, err := sb.Exec(ctx, client.ExecRequest{Command: "dd if=kept iflag=direct bs=1M status=none | sha256sum; pgrep -c sleep"})
		if err != nil {
			f.lost("the sandbox %s: %v", r.id, err)
		} else if want := r.sum + "  -\n1\n"; out.Stdout != want {
			f.lost("the file or process of %s: %q %q, want %q", r.id, out.Stdout, out.Stderr, want)
		}
	}
}

// serves waits until a new sandbox runs a cell and notes how long that took since a moment.
func (f *fault) serves(s *testserver.Server, since time.Time, limit time.Duration) {
	f.Helper()
	var last error
	for {
		if last = f.tryOne(s); last == nil {
			f.row.Service = time.Since(since).Seconds()
			return
		}
		if time.Since(since) > limit {
			f.Fatalf("no service %v after the fault: %v", limit, last)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// tryOne makes a sandbox, runs a cell and ends it.
func (f *fault) tryOne(s *testserver.Server) error {
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	sb, err := s.Create(ctx, client.CreateRequest{TimeoutSeconds: 120})
	if err != nil {
		return err
	}
	return errors.Join(wants(ctx, sb, "6 * 7", "42"), sb.Kill(ctx))
}

// eventually waits for a condition; the wait is only as long as it takes.
func (f *fault) eventually(what string, limit time.Duration, is func() bool) bool {
	f.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.Errorf("after %v it is not so that %s", limit, what)
			return false
		}
	}
	return true
}

// moment waits a random part of a duration.
func (f *fault) moment(most time.Duration) { time.Sleep(time.Duration(f.rand.Int64N(int64(most)))) }

// count takes a census when the server has come to rest: all sandboxes but the residents have ended, the pool is full.
func (f *fault) count(s *testserver.Server, residents []resident) testserver.Census {
	f.Helper()
	keep := map[string]bool{}
	for _, r := range residents {
		keep[r.id] = true
	}
	f.eventually("no sandbox lives but those that were there before", patience, func() bool {
		living := 0
		for sb, err := range s.List(f.Context(), client.ListRequest{States: []string{"starting", "running", "stopping"}}) {
			if err != nil {
				f.Fatalf("list: %v", err)
			}
			if !keep[sb.ID] {
				living++
				_ = s.Sandbox(sb.ID).Kill(f.Context())
			}
		}
		return living == 0
	})
	var c, last testserver.Census
	looks := 0 // that were the same: the pool is counted before all of its sandboxes are furnished
	f.eventually("the maker is at rest", patience, func() (rest bool) {
		var err error
		last = c
		if c, err = s.Count(f.Context()); err != nil {
			f.Fatalf("count: %v", err)
		}
		pool := c["maker's pool"]
		if !maps.Equal(c, last) {
			looks = 0
		}
		looks++
		return looks >= 20 && c["maker's sandboxes"] == len(residents) && c["maker's dying"] == 0 && pool >= 8 && c["maker's slots"] == pool+len(residents)
	})
	return c
}

// nothingLeft compares with a census from before the fault. A pool may have grown by what a slot needs.
func (f *fault) nothingLeft(s *testserver.Server, residents []resident, before testserver.Census) {
	f.Helper()
	f.row.Counted = true
	var more []string
	for deadline := time.Now().Add(2 * soon); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		now := f.count(s, residents)
		if more = now.Above(allowing(before, now["maker's pool"]-before["maker's pool"])); len(more) == 0 {
			return
		}
	}
	for _, m := range more {
		f.Errorf("left over: %s", m)
	}
	if len(more) > 0 {
		f.note("before the fault: %v; after it: %v", before, f.count(s, residents))
	}
}

// allowing is a census that has so many more pooled sandboxes.
func allowing(c testserver.Census, pooled int) testserver.Census {
	more := testserver.Census{}
	slots := max(c["maker's slots"], 1)
	for what, n := range c {
		switch what {
		case "maker's pool", "maker's slots", "links", "loop devices":
			n += max(pooled, 0)
		case "cgroups", "processes", "nft elements", "zygotes' children":
			n += max(pooled, 0) * ((n + slots - 1) / slots)
		}
		more[what] = n
	}
	return more
}

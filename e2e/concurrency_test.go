package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// together calls f n times at once.
func together(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

func TestS0_81_S4_55_ManyAtOnce(t *testing.T) {
	s := sharedServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	begun := time.Now()
	var mu sync.Mutex
	ids := map[string]bool{}
	together(50, func(i int) {
		sb, err := s.Create(ctx, client.CreateRequest{TimeoutSeconds: 1800, Limits: &client.Limits{MemoryBytes: 256 << 20}})
		if err != nil {
			t.Errorf("create %d: %v", i, err)
			return
		}
		for cell, want := range []string{"", fmt.Sprint(i), fmt.Sprint(2 * i)} {
			out, err := sb.Run(ctx, client.RunRequest{Code: []string{fmt.Sprintf("mine = %d", i), "mine", "import numpy; int(numpy.array([mine, mine]).sum())"}[cell]})
			if err != nil || out.Text() != want {
				t.Errorf("sandbox %d, cell %d: %v %+v", i, cell, err, out)
			}
		}
		mu.Lock()
		ids[sb.ID] = true
		mu.Unlock()
	})
	t.Logf("50 sandboxes with three cells each took %v", time.Since(begun).Round(time.Millisecond))
	if len(ids) != 50 {
		t.Errorf("%d sandboxes, not 50", len(ids))
	}
	together(8, func(int) {
		for {
			mu.Lock()
			var id string
			for id = range ids {
				break
			}
			delete(ids, id)
			mu.Unlock()
			if id == "" {
				return
			}
			if err := s.Sandbox(id).Kill(ctx); err != nil {
				t.Errorf("kill: %v", err)
			}
		}
	})
}

func TestAKeyMakesOneSandboxForAll(t *testing.T) {
	s := sharedServer(t)
	var mu sync.Mutex
	ids := map[string]int{}
	together(20, func(int) {
		sb, err := s.Create(t.Context(), client.CreateRequest{Key: "all-at-once", TimeoutSeconds: 60})
		if err != nil {
			t.Errorf("create: %v", err)
			return
		}
		out, err := sb.Run(t.Context(), client.RunRequest{Code: "n = globals().get('n', 0) + 1"})
		if err != nil || out.Outcome != client.OutcomeOK {
			t.Errorf("run: %v %+v", err, out)
		}
		mu.Lock()
		defer mu.Unlock()
		ids[sb.ID]++
	})
	if len(ids) != 1 {
		t.Fatalf("20 callers have %v", ids)
	}
	for id := range ids {
		sb := &sandbox{t, s.Sandbox(id)}
		if got := sb.value("n"); got != "20" {
			t.Errorf("of 20 cells at once %s counted", got)
		}
		sb.kill()
	}
}

func TestARepeatedCreateFindsWhatTheFirstMade(t *testing.T) {
	s := sharedServer(t)
	post := func(key, body string) (int, client.SandboxInfo) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+client.Prefix+"/sandboxes", bytes.NewBufferString(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", s.key)
		req.Header.Set("Idempotency-Key", key)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			return 0, client.SandboxInfo{}
		}
		defer resp.Body.Close()
		var info client.SandboxInfo
		_ = json.NewDecoder(resp.Body).Decode(&info) // a refusal is judged by its status
		return resp.StatusCode, info
	}
	var mu sync.Mutex
	ids, made := map[string]bool{}, 0
	together(10, func(int) {
		status, info := post("once", `{"timeout_seconds": 600}`)
		mu.Lock()
		defer mu.Unlock()
		ids[info.ID] = true
		if status == http.StatusCreated {
			made++
		}
	})
	if len(ids) != 1 || made != 1 {
		t.Errorf("ten requests have %v and made %d", ids, made)
	}
	if status, _ := post("once", `{"timeout_seconds": 61}`); status != http.StatusConflict {
		t.Errorf("another request under the same key: %d", status)
	}
	s.crash(t)
	s.start(t)
	status, info := post("once", `{"timeout_seconds": 600}`)
	if status != http.StatusOK || !ids[info.ID] {
		t.Errorf("after a crash: %d %s, it was %v", status, info.ID, ids)
	}
	if err := s.Sandbox(info.ID).Kill(t.Context()); err != nil {
		t.Error(err)
	}
}

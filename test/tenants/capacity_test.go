package tenants_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// rounds is how many sandboxes B makes, uses and ends under each load.
const rounds = 5

// load is what A does to the server, until it is released.
type load struct {
	*testing.T
	w      *world
	stop   context.CancelFunc
	ctx    context.Context
	wg     sync.WaitGroup
	mu     sync.Mutex
	counts map[string]int
}

// saw counts an answer that A got.
func (l *load) saw(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[what]++
}

// each starts n workers of A and returns when each has said that its load is in place, or that it was refused.
func (l *load) each(n int, do func(i int, placed func(status string))) {
	l.Helper()
	var waiting sync.WaitGroup
	waiting.Add(n)
	for i := range n {
		l.wg.Go(func() {
			var once sync.Once
			placed := func(status string) {
				once.Do(func() {
					l.saw(status)
					waiting.Done()
				})
			}
			defer placed("ended")
			do(i, placed)
		})
	}
	all := make(chan struct{})
	go func() {
		waiting.Wait()
		close(all)
	}()
	select {
	case <-all:
	case <-time.After(patience):
		l.Errorf("A's load is not in place after %v", patience)
	}
}

// stream sends a request of A and holds its answer open without reading on.
func (l *load) stream(placed func(string), method, path, body string) {
	req, err := http.NewRequestWithContext(l.ctx, method, l.w.server.URL+path, strings.NewReader(body))
	if err != nil {
		placed(err.Error())
		return
	}
	req.Header.Set("Authorization", "Bearer "+l.w.a.key)
	resp, err := l.w.http.Do(req)
	if err != nil {
		placed(kindOf(err))
		return
	}
	defer resp.Body.Close()
	placed(fmt.Sprint(resp.StatusCode))
	if resp.StatusCode/100 == 2 {
		<-l.ctx.Done()
	}
}

// withhold sends a request of A but for the last byte of its body. The load is in place when the
// rest is sent, or when the server has answered before.
func (l *load) withhold(placed func(string), path string, body []byte) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(l.w.server.URL, "http://"))
	if err != nil {
		placed(kindOf(err))
		return
	}
	defer conn.Close()
	l.wg.Go(func() {
		if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
			placed(fmt.Sprint(resp.StatusCode))
			resp.Body.Close()
		}
	})
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", path, l.w.a.key, len(body))
	if err == nil {
		_, err = conn.Write(body[:len(body)-1])
	}
	select {
	case <-l.ctx.Done():
	case <-time.After(time.Second): // for the answer to a body that the server has stopped reading
	}
	placed(kindOf(err))
	<-l.ctx.Done()
}

// kindOf names an error that A got: a status, or that its connection was refused or cut.
func kindOf(err error) string {
	var e *client.Error
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e) && e.Status != 0:
		return fmt.Sprint(e.Status)
	case errors.As(err, &e):
		return string(e.Kind)
	case errors.Is(err, context.Canceled):
		return "left"
	}
	return "cut"
}

// again repeats something until the load is released.
func (l *load) again(placed func(string), do func() error) {
	for l.ctx.Err() == nil {
		status := kindOf(do())
		l.saw(status)
		placed("begun")
	}
}

// sandbox is one of A's for this load alone. Its disk is small: what is filled is A's share and not the host's.
func (l *load) sandbox() *client.Sandbox {
	l.Helper()
	var sb *client.Sandbox
	err := errNotYet
	for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		// Under its own load A may be refused for a moment.
		sb, err = l.w.a.api.Create(l.ctx, client.CreateRequest{TimeoutSeconds: 3600, Limits: &client.Limits{DiskBytes: 256 << 20}})
	}
	if err != nil {
		l.Errorf("A's sandbox: %v", err)
		return l.w.a.api.Sandbox("none")
	}
	l.Cleanup(func() { _ = sb.Kill(context.Background()) }) // it ends with its load
	return sb
}

// inside runs a command in n sandboxes of A. It is in place when it says so on a line of its own.
func (l *load) inside(n int, command string) {
	l.Helper()
	l.each(n, func(_ int, placed func(string)) {
		for e, err := range l.sandbox().ExecStream(l.ctx, client.ExecRequest{Command: command}) {
			if err != nil {
				placed(kindOf(err))
				return
			}
			if e.Type == client.EventStdout {
				placed("begun")
			}
		}
	})
}

// loads are the ways in which one tenant can take what the other needs.
//
// limit is how A is refused what is more than its share; empty: nothing of it is.
var loads = []struct {
	name  string
	limit string
	begin func(l *load)
}{
	{"nothing", "", func(*load) {}},
	{"200 streams of events", "429", func(l *load) {
		l.each(200, func(_ int, placed func(string)) { l.stream(placed, "GET", "/cove/v1/events?follow=true", "") })
	}},
	{"200 followers of a session's log", "429", func(l *load) {
		key := l.w.a.word("session")
		if _, err := l.w.a.api.OpenSession(l.ctx, key, client.SessionRequest{}); err != nil {
			l.Fatal(err)
		}
		l.Cleanup(func() { _ = l.w.a.api.RemoveSession(context.Background(), key) })
		l.each(200, func(_ int, placed func(string)) {
			l.stream(placed, "GET", "/cove/v1/sessions/"+key+"/log?follow=true", "")
		})
	}},
	{"2,000 connections without a request", "", func(l *load) {
		l.each(2000, func(_ int, placed func(string)) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(l.w.server.URL, "http://"))
			if err != nil {
				placed(kindOf(err))
				return
			}
			defer conn.Close()
			placed("open")
			<-l.ctx.Done()
		})
	}},
	{"1,000 bodies that do not come", "", func(l *load) {
		l.each(1000, func(_ int, placed func(string)) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(l.w.server.URL, "http://"))
			if err != nil {
				placed(kindOf(err))
				return
			}
			defer conn.Close()
			_, err = fmt.Fprintf(conn, "POST /cove/v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 1000\r\n\r\n{", l.w.a.key)
			placed(kindOf(err))
			<-l.ctx.Done()
		})
	}},
	{"100 bodies of 15 MiB whose last byte does not come", "429", func(l *load) {
		sb := l.sandbox()
		body := bytes.Repeat([]byte(" "), 15<<20)
		l.each(100, func(_ int, placed func(string)) { l.withhold(placed, "/cove/v1/sandboxes/"+sb.ID+"/exec", body) })
	}},
	{"100 commands with 15 MiB of stdin that they do not read", "429", func(l *load) {
		sb := l.sandbox()
		body := `{"command":"sleep 3600","stdin":"` + strings.Repeat("a", 15<<20) + `"}`
		l.each(100, func(_ int, placed func(string)) { l.stream(placed, "POST", "/cove/v1/sandboxes/"+sb.ID+"/exec", body) })
	}},
	{"400 terminals in one sandbox", "", func(l *load) {
		sb := l.sandbox()
		l.each(400, func(_ int, placed func(string)) {
			x, err := sb.Start(l.ctx, client.ExecRequest{Argv: []string{"cat"}, PTY: &client.PTYSize{Cols: 80, Rows: 24}})
			if err != nil {
				placed(kindOf(err))
				return
			}
			defer x.Close()
			for e, err := range x.Events() {
				if err != nil {
					placed(kindOf(err))
					return
				}
				placed(string(e.Type))
			}
		})
	}},
	{"kernels until there are no more, in two sandboxes", "", func(l *load) {
		boxes := []*client.Sandbox{l.sandbox(), l.sandbox()}
		l.each(120, func(i int, placed func(string)) {
			_, err := boxes[i%2].StartKernel(l.ctx, client.KernelRequest{Language: "bash"})
			placed(kindOf(err))
		})
	}},
	{"400 watchers", "429", func(l *load) {
		sb := l.sandbox()
		l.each(400, func(_ int, placed func(string)) {
			l.stream(placed, "GET", "/cove/v1/sandboxes/"+sb.ID+"/files/watch?path=.&recursive=true", "")
		})
	}},
	{"uploads of 100 MB, eight at a time", "", func(l *load) {
		sb := l.sandbox()
		l.each(8, func(i int, placed func(string)) {
			l.again(placed, func() error {
				placed("begun")
				_, err := sb.Files().Write(l.ctx, fmt.Sprintf("big%d", i), io.LimitReader(zeros{}, 100<<20), client.WriteOptions{})
				return err
			})
		})
	}},
	{"full disks in four sandboxes", "", func(l *load) {
		l.inside(4, "while true; do dd if=/dev/zero of=full bs=1M 2>/dev/null; echo full; rm full; done")
	}},
	{"descriptors, pipes and processes until there are no more", "", func(l *load) {
		l.inside(2, `python3 -c '
import os, time
fds = []
def take():
    try:
        while True: fds.append(os.pipe())
    except OSError: pass
try:
    while os.fork() == 0: take()
except OSError: pass
take(); print("taken", flush=True); time.sleep(3600)'`)
	}},
	{"memory until it is refused", "", func(l *load) {
		l.inside(2, `echo begins; while true; do python3 -c 'b = []
while True: b.append(bytearray(1 << 24))'; done`)
	}},
	{"floods of output that is not read, 64 at a time", "", func(l *load) {
		sb := l.sandbox()
		l.each(64, func(_ int, placed func(string)) {
			l.stream(placed, "POST", "/cove/v1/sandboxes/"+sb.ID+"/exec", `{"command":"yes"}`)
		})
	}},
	{"200 creates at a time", "", func(l *load) {
		l.each(200, func(_ int, placed func(string)) {
			l.again(placed, func() error {
				placed("begun")
				sb, err := l.w.a.api.Create(l.ctx, client.CreateRequest{TimeoutSeconds: 60})
				if err != nil {
					return err
				}
				return sb.Kill(context.WithoutCancel(l.ctx))
			})
		})
	}},
	{"lists and wrong requests without a pause, 32 at a time", "", func(l *load) {
		l.each(32, func(i int, placed func(string)) {
			l.again(placed, func() error {
				placed("begun")
				if i%2 == 0 {
					return l.w.a.api.Sandbox("sbnone").Refresh(l.ctx)
				}
				for _, err := range l.w.a.api.List(l.ctx, client.ListRequest{}) {
					if err != nil {
						return err
					}
				}
				return nil
			})
		})
	}},
	{"busy processors in eight sandboxes", "", func(l *load) {
		l.inside(8, "echo begins; for i in 1 2 3 4; do (while :; do :; done) & done; wait")
	}},
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// TestCapacity has A do its worst, of one kind at a time and then of many, while B goes on.
func TestCapacity(t *testing.T) {
	w := newWorld(t, "COVE_SERVER_MAX_CONNECTIONS=2048")
	// Clients of another host: what one address may have is A's own.
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	away := &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext}}
	t.Cleanup(away.CloseIdleConnections)
	b, err := client.New(w.server.URL, w.b.key, client.WithHTTPClient(away))
	if err != nil {
		t.Fatal(err)
	}
	w.sandbox(w.a, client.CreateRequest{}) // followers of events are answered when there is a first event
	var alone pace
	for _, c := range loads {
		t.Run(c.name, func(t *testing.T) {
			took := w.under(t, c.name, c.limit, b, c.begin, 0)
			if alone.round == nil {
				alone = took
			}
			took.compare(t, alone, 1)
		})
	}
	// All that is not about connections of an address, of which A has none left to share.
	many := func(l *load) {
		for _, c := range loads {
			if !strings.Contains(c.name, "connections") && !strings.Contains(c.name, "bodies") {
				c.begin(l)
			}
		}
	}
	t.Run("many at once", func(t *testing.T) {
		w.under(t, "many of these at once", "", b, many, 4*rounds).compare(t, alone, crowd)
	})
	t.Run("many at once, from one address", func(t *testing.T) {
		w.under(t, "many of these at once, and B has the same address", "", w.b.api, many, 4*rounds).compare(t, alone, crowd)
	})
}

// pace is how long B's rounds took, and the lists in them.
type pace struct{ round, list []time.Duration }

// What B must have under each load of A, compared with the load "nothing" of the same run: times
// how long that took, or the floor where that is more.
//
// The floors are for a machine that is busy with other tests. The median does not move with the one
// round that such a machine delays, so its floors are low; the slowest round has a high one. A list
// reads a few rows and waits for no sandbox, so its floor is the lowest.
const (
	slowestTimes, slowestFloor = 40, 60 * time.Second
	medianTimes, medianFloor   = 10, 5 * time.Second
	listTimes, listFloor       = 20, time.Second
)

// crowd multiplies the floors of the medians under many loads at once: together they keep both
// processors and the disk of a small machine busy.
const crowd = 6

func (p pace) compare(t *testing.T, alone pace, more time.Duration) {
	t.Helper()
	for _, c := range []struct {
		what        string
		took, alone time.Duration
		times       time.Duration
		floor       time.Duration
	}{
		{"slowest round", slices.Max(p.round), slices.Max(alone.round), slowestTimes, slowestFloor},
		{"median round", median(p.round), median(alone.round), medianTimes, more * medianFloor},
		{"median list", median(p.list), median(alone.list), listTimes, more * listFloor},
	} {
		if limit := max(c.times*c.alone, c.floor); c.took > limit {
			t.Errorf("B's %s took %v; without a load it took %v, so at most %v are allowed", c.what, c.took, c.alone, limit)
		}
	}
}

func median(all []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(all))[len(all)/2]
}

// under has A put a load on the server and returns how long B's rounds took meanwhile. Where all loads together keep
// the host's disk busy, the database may not answer within its limit: then B may be told so many times to try again (503).
func (w *world) under(t *testing.T, name, limit string, b *client.Client, begin func(*load), busy int) (took pace) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	l := &load{T: t, w: w, ctx: ctx, stop: stop, counts: map[string]int{}}
	// Cleanups run last to first: the load ends before what it stands on.
	defer l.wg.Wait()
	defer stop()
	result := row{route: "capacity: " + name, verdict: holds}
	defer func() {
		if t.Failed() {
			result.verdict = broken
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		result.a = counted(l.counts)
		addRow(result)
	}()
	begin(l)
	l.mu.Lock()
	if limit != "" && l.counts[limit] == 0 {
		t.Errorf("A has %s, and no request of it was refused with %s", name, limit)
	}
	l.mu.Unlock()
	again := 0
	for range rounds {
		begun := time.Now()
		list, err := round(ctx, b)
		for ; again < busy && kindOf(err) == "503"; again++ {
			time.Sleep(time.Second) // what Retry-After says
			list, err = round(ctx, b)
		}
		if err != nil {
			t.Errorf("B, while A has %s: %v", name, err)
		}
		took.round, took.list = append(took.round, time.Since(begun)), append(took.list, list)
	}
	result.b = fmt.Sprintf("%d rounds, median %.2fs, slowest %.2fs, median of lists %.3fs",
		rounds, median(took.round).Seconds(), slices.Max(took.round).Seconds(), median(took.list).Seconds())
	if again > 0 {
		result.b += fmt.Sprintf(", %d times 503", again)
	}
	return took
}

// round is the life of one sandbox of B. It returns how long the list took.
func round(ctx context.Context, b *client.Client) (list time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	sb, err := b.Create(ctx, client.CreateRequest{TimeoutSeconds: 300})
	if err != nil {
		return 0, fmt.Errorf("create: %w", err)
	}
	defer func() {
		if killed := sb.Kill(ctx); err == nil && killed != nil {
			err = fmt.Errorf("kill: %w", killed)
		}
	}()
	out, err := sb.Exec(ctx, client.ExecRequest{Command: "echo $((6 * 7)) > answer; cat answer"})
	if err != nil || out.Stdout != "42\n" {
		return 0, fmt.Errorf("exec: %w, %+v", err, out)
	}
	begun := time.Now()
	for seen, err := range b.List(ctx, client.ListRequest{States: []string{"running"}}) {
		if err != nil {
			return 0, fmt.Errorf("list: %w", err)
		}
		if seen.ID == sb.ID {
			return time.Since(begun), nil
		}
	}
	return 0, errors.New("list: the sandbox is not there")
}

func counted(counts map[string]int) string {
	var words []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		words = append(words, fmt.Sprintf("%s:%d", what, counts[what]))
	}
	return strings.Join(words, " ")
}

package fleet_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/fleet"
	"github.com/covehq/cove/internal/sandbox"
)

const (
	one   = "sbaaaaaaaaaaaaaaaaaaaaaaaa"
	two   = "sbbbbbbbbbbbbbbbbbbbbbbbbb"
	three = "sbcccccccccccccccccccccccc"
)

var quiet = slog.New(slog.DiscardHandler)

// book is a Store whose clock stands still: who is dead is said by the test.
type book struct {
	mu      sync.Mutex
	all     []sandbox.Server
	owners  map[string]string
	lookups int
	down    bool
	given   map[string][]sandbox.Record
}

func newBook() *book { return &book{owners: map[string]string{}, given: map[string][]sandbox.Record{}} }

var errDown = errors.New("the database is down")

func (b *book) JoinServers(_ context.Context, s sandbox.Server) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, s)
	return nil
}

func (b *book) LeaveServers(_ context.Context, id string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = slices.DeleteFunc(b.all, func(s sandbox.Server) bool { return s.ID == id })
	return nil
}

func (b *book) Beat(_ context.Context, id string, _ time.Duration) ([]sandbox.Server, []sandbox.Record, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return nil, nil, errDown
	}
	if !slices.ContainsFunc(b.all, func(s sandbox.Server) bool { return s.ID == id }) {
		return nil, nil, sandbox.ErrExpelled
	}
	given := b.given[id]
	delete(b.given, id)
	return slices.Clone(b.all), given, nil
}

func (b *book) Owner(_ context.Context, id string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lookups++
	if b.down {
		return "", errDown
	}
	if owner := b.owners[id]; owner != "" {
		return owner, nil
	}
	return "", fault.New(fault.NotFound, "none")
}

func (b *book) change(do func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	do()
}

// domain is what a server has.
type domain struct {
	mu       sync.Mutex
	has      map[string]bool
	names    []string
	failures int // of TakeOver
	looks    int
}

func (d *domain) Has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.has[id]
}

func (d *domain) TakeOver(_ context.Context, records []sandbox.Record) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(records) > 0 && d.failures > 0 {
		d.failures--
		return errDown
	}
	for _, r := range records {
		d.has[r.ID] = true
	}
	return nil
}

func (d *domain) Expelled(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.has)
	d.names = append(d.names, name)
}

func (d *domain) Reconcile(context.Context, bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks++
	return nil
}

// office counts terms.
type office struct {
	mu              sync.Mutex
	taken, resigned int
}

func (o *office) Take(context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.taken++
	return nil
}

func (o *office) Resign() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resigned++
}

func (o *office) terms() (taken, resigned int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken, o.resigned
}

// server is one of a fleet, with a handler behind it.
type server struct {
	*fleet.Fleet
	domain  *domain
	office  *office
	public  *httptest.Server
	handler http.Handler
	peers   *http.Server
}

func authority(t *testing.T) []byte {
	t.Helper()
	text, err := fleet.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// start starts a server whose handler says its name unless another is given.
func start(t *testing.T, b *book, shared []byte, name string, handler http.Handler) *server {
	t.Helper()
	identity, err := fleet.OpenIdentity(shared)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := fleet.Config{URL: "https://" + l.Addr().String(), Every: 20 * time.Millisecond, Dead: 3 * time.Second, Look: 50 * time.Millisecond,
		LastWords: func(r *http.Request, mediaType, message string) []byte {
			if mediaType != "application/x-ndjson" {
				return nil
			}
			return []byte(`{"gone":"` + message + `"}` + "\n")
		}}
	f, err := fleet.Join(t.Context(), cfg, b, identity, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if handler == nil {
		handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			io.WriteString(w, name)
		})
	}
	s := &server{Fleet: f, domain: &domain{has: map[string]bool{}}, office: &office{}, handler: handler}
	first := func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/first") }
	lost := func(w http.ResponseWriter, r *http.Request, message string) bool {
		if strings.HasSuffix(r.URL.Path, "/once") {
			io.WriteString(w, "not again: "+message)
		}
		return strings.HasSuffix(r.URL.Path, "/once")
	}
	elsewhere := f.Elsewhere(fleet.Door{Name: "main", Native: "/native/", First: first, Lost: lost})
	door := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if other := elsewhere(r); other != nil {
			other.ServeHTTP(w, r)
			return
		}
		s.handler.ServeHTTP(w, r)
	})
	s.public = httptest.NewServer(door)
	s.peers = &http.Server{Handler: f.Peers(map[string]http.Handler{"main": door}), ErrorLog: slog.NewLogLogger(quiet.Handler(), slog.LevelDebug)}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	begun := make(chan struct{})
	work.Go(func() { f.Work(ctx, s.domain, s.office, func() { close(begun) }) })
	work.Go(func() { s.peers.Serve(newTLS(l, identity)) })
	<-begun
	t.Cleanup(func() {
		s.public.Close()
		s.peers.Close()
		cancel()
		work.Wait()
		f.Leave()
	})
	return s
}

func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatalf("not in time: %s", what)
}

// ask sends a request; headers are "Name: value".
func ask(t *testing.T, s *server, path string, headers ...string) (status int, body string, header http.Header) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "POST", s.public.URL+path, strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
		if name == "Host" {
			r.Host = value
		}
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text), resp.Header
}

// pair starts two servers that know each other; a has sandbox one and is the first, b has two.
func pair(t *testing.T, handler http.Handler) (*book, *server, *server) {
	t.Helper()
	b, shared := newBook(), authority(t)
	first := start(t, b, shared, "a", handler)
	second := start(t, b, shared, "b", nil)
	first.domain.has[one], second.domain.has[two] = true, true
	b.change(func() { b.owners[one], b.owners[two], b.owners[three] = first.Me(), second.Me(), "svdead" })
	soon(t, "the first knows the second", func() bool {
		status, _, _ := ask(t, first, "/sandboxes/"+two)
		return status == http.StatusOK
	})
	return b, first, second
}

func TestARequestGoesToTheServerOfItsSandbox(t *testing.T) {
	b, first, second := pair(t, nil)
	for name, c := range map[string]struct {
		path    string
		headers []string
		from    *server
		want    string
	}{
		"here":                                   {"/cove/v1/sandboxes/" + two, nil, second, "b"},
		"by path":                                {"/cove/v1/sandboxes/" + one + "/run", nil, second, "a"},
		"by path, the other way":                 {"/sandboxes/" + two + "/timeout?x=%zz", nil, first, "b"},
		"by path, with what follows the id":      {"/sandboxes/" + one + "~1~2/proxy/80/x", nil, second, "a"},
		"by header":                              {"/execute", []string{"E2b-Sandbox-Id: " + one}, second, "a"},
		"by header with a client's id":           {"/execute", []string{"E2b-Sandbox-Id: " + one + "-abc"}, second, "a"},
		"by host":                                {"/", []string{"Host: 8080-" + one + ".cove.localhost:80"}, second, "a"},
		"host before header and path":            {"/sandboxes/" + two, []string{"Host: 8080-" + one + ".x", "E2b-Sandbox-Id: " + two}, second, "a"},
		"header before path":                     {"/sandboxes/" + two, []string{"E2b-Sandbox-Id: " + one}, second, "a"},
		"native path before header":              {"/native/sandboxes/" + two, []string{"E2b-Sandbox-Id: " + one}, second, "b"},
		"host before native path":                {"/native/" + two, []string{"Host: 8080-" + one + ".x"}, second, "a"},
		"what the first does":                    {"/first/" + two, nil, second, "a"},
		"what the first does, at the first":      {"/first", nil, first, "a"},
		"no sandbox":                             {"/sandboxes", nil, second, "b"},
		"one that nobody has":                    {"/sandboxes/sbdddddddddddddddddddddddd", nil, second, "b"},
		"what only looks like an id":             {"/sandboxes/" + one + "x", nil, second, "b"},
		"an id deep in a path":                   {"/a/b/c/d/e/f/" + one, nil, second, "b"},
		"who says that it was passed on already": {"/sandboxes/" + one, []string{"Cove-Via: door=main"}, second, "a"},
	} {
		if status, body, _ := ask(t, c.from, c.path, c.headers...); status != http.StatusOK || body != c.want {
			t.Errorf("%s: %d %s, want %s", name, status, body, c.want)
		}
	}
	status, body, header := ask(t, second, "/sandboxes/"+three)
	var said struct {
		Code, Message, Detail string
		Error                 struct{ Kind, Message string }
	}
	if err := json.Unmarshal([]byte(body), &said); err != nil || status != 503 || header.Get("Retry-After") == "" || said.Error.Kind != "unavailable" ||
		said.Message == "" || said.Message != said.Error.Message || said.Detail != said.Message || said.Code != "unavailable" {
		t.Errorf("a sandbox whose server is gone: %d %s, %v", status, body, err)
	}
	before := b.lookups
	for range 50 {
		ask(t, second, "/sandboxes/"+one)
	}
	if asked := b.lookups - before; asked > 5 {
		t.Errorf("the database was asked %d times for 50 requests", asked)
	}
}

func TestWhatACallerSentArrives(t *testing.T) {
	seen := make(chan *http.Request, 1)
	_, _, second := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		seen <- r
	}))
	ask(t, second, "/sandboxes/"+one+"/a%2Fb?q=%zz&x=1;2", "Host: example.test", "X-Forwarded-For: 192.0.2.7", "X-Forwarded-Proto: https", "Authorization: Bearer x", "Cove-Via: remote=evil")
	r := <-seen
	body, _ := io.ReadAll(r.Body)
	if r.Host != "example.test" || r.URL.EscapedPath() != "/sandboxes/"+one+"/a%2Fb" || r.URL.RawQuery != "q=%zz&x=1;2" || string(body) != "body" {
		t.Errorf("%s %s %s %q", r.Host, r.URL.EscapedPath(), r.URL.RawQuery, body)
	}
	if r.Header.Get("X-Forwarded-For") != "192.0.2.7" || r.Header.Get("X-Forwarded-Proto") != "https" || r.Header.Get("Authorization") != "Bearer x" || r.Header.Get("Cove-Via") != "" {
		t.Errorf("headers: %v", r.Header)
	}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err != nil || host != "127.0.0.1" || r.TLS != nil {
		t.Errorf("from %s, TLS %v", r.RemoteAddr, r.TLS != nil)
	}
}

func TestAStreamPassesAsItComes(t *testing.T) {
	next := make(chan string)
	_, _, second := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body, err := io.ReadAll(r.Body); err != nil || len(body) != 1<<20 {
			t.Errorf("%d bytes, %v", len(body), err)
		}
		w.Header().Set("Trailer", "X-End")
		for text := range next {
			io.WriteString(w, text)
			http.NewResponseController(w).Flush()
		}
		w.Header().Set("X-End", "well")
	}))
	answers := make(chan *http.Response)
	go func() {
		resp, err := http.Post(second.public.URL+"/sandboxes/"+one, "", struct{ io.Reader }{bytes.NewReader(make([]byte, 1<<20))}) // of unknown length
		if err != nil {
			t.Error(err)
		}
		answers <- resp
	}()
	next <- "x"
	resp := <-answers
	if resp == nil {
		return
	}
	defer resp.Body.Close()
	b := make([]byte, 1)
	for _, text := range []string{"x", "y", "z"} {
		if text != "x" {
			next <- text
		}
		if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != text {
			t.Fatalf("%q came as %q, %v", text, b, err)
		}
	}
	close(next)
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) != 0 || resp.Trailer.Get("X-End") != "well" {
		t.Errorf("%q, %v, trailer %v", rest, err, resp.Trailer)
	}
}

func TestAnUpgradePasses(t *testing.T) {
	_, _, second := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+r.Header.Get("Upgrade")+"\r\n\r\n")
		io.Copy(conn, rw)
	}))
	u, _ := url.Parse(second.public.URL)
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "GET /sandboxes/"+one+" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n")
	answer := make([]byte, len("HTTP/1.1 101"))
	if _, err := io.ReadFull(conn, answer); err != nil || string(answer) != "HTTP/1.1 101" {
		t.Fatalf("%q, %v", answer, err)
	}
	io.WriteString(conn, "echo")
	conn.(*net.TCPConn).CloseWrite()
	if all, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(all), "\r\n\r\necho") {
		t.Errorf("%q, %v", all, err)
	}
}

func TestAStreamWhoseServerIsGoneSaysSo(t *testing.T) {
	envelope := binary.BigEndian.AppendUint32([]byte{0}, 3)
	for name, c := range map[string]struct {
		mediaType, said, want string
		broken                bool // the connection is cut
	}{
		"lines":                          {"application/x-ndjson", "{}\n", `"gone"`, false},
		"in the middle of a line":        {"application/x-ndjson", "{", "", true},
		"Connect":                        {"application/connect+proto", string(envelope) + "abc", "\x02", false},
		"Connect, the middle":            {"application/connect+json", string(envelope) + "ab", "", true},
		"whatever a sandbox's port says": {"text/html", "<p>\n", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			_, first, second := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", c.mediaType)
				io.WriteString(w, c.said)
				http.NewResponseController(w).Flush()
				<-r.Context().Done()
			}))
			resp, err := http.Post(second.public.URL+"/sandboxes/"+one, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := io.ReadFull(resp.Body, make([]byte, len(c.said))); err != nil {
				t.Fatal(err)
			}
			first.peers.Close()
			rest, err := io.ReadAll(resp.Body)
			if (err != nil) != c.broken || !c.broken && (!strings.HasPrefix(string(rest), c.want) && !strings.Contains(string(rest), c.want) || !strings.Contains(string(rest), "the server that ran this is gone")) {
				t.Errorf("%q, %v", rest, err)
			}
		})
	}
}

func TestAServerThatDoesNotAnswerIsTold(t *testing.T) {
	_, first, second := pair(t, nil)
	first.peers.Close()
	if status, body, header := ask(t, second, "/sandboxes/"+one); status != 503 || header.Get("Retry-After") == "" || !strings.Contains(body, "does not answer") {
		t.Errorf("%d %s", status, body)
	}
}

func TestAServerThatHangsKeepsNobodyWaiting(t *testing.T) {
	begun := make(chan string, 2)
	b, first, second := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/stream") {
			w.Header().Set("Content-Type", "application/x-ndjson")
			io.WriteString(w, "{}\n")
			http.NewResponseController(w).Flush()
		}
		begun <- r.URL.Path
		<-r.Context().Done() // it says nothing more
	}))
	type answer struct {
		status int
		body   string
	}
	answers := map[string]chan answer{"/stream": make(chan answer, 1), "/silent": make(chan answer, 1)}
	for path, to := range answers {
		go func() {
			status, body, _ := ask(t, second, "/sandboxes/"+one+path)
			to <- answer{status, body}
		}()
	}
	<-begun
	<-begun
	b.change(func() { b.all = slices.DeleteFunc(b.all, func(s sandbox.Server) bool { return s.ID == first.Me() }) })
	if a := <-answers["/stream"]; a.status != 200 || !strings.Contains(a.body, "the server that ran this is gone") {
		t.Errorf("a stream: %+v", a)
	}
	if a := <-answers["/silent"]; a.status != 503 || !strings.Contains(a.body, "does not answer") {
		t.Errorf("one without an answer: %+v", a)
	}
}

func TestWhatMustNotBeDoneTwiceIsNotAskedForAgain(t *testing.T) {
	begun := make(chan struct{}, 1)
	_, first, second := pair(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		begun <- struct{}{}
		<-r.Context().Done()
	}))
	done := make(chan string, 1)
	go func() {
		status, body, _ := ask(t, second, "/sandboxes/"+one+"/once")
		done <- fmt.Sprint(status, " ", body)
	}()
	<-begun
	first.peers.Close()
	if got := <-done; got != "200 not again: the server of this sandbox is gone" {
		t.Error(got)
	}
	// Nobody is there who could have begun.
	if status, body, _ := ask(t, second, "/sandboxes/"+one+"/once"); status != 503 {
		t.Errorf("%d %s", status, body)
	}
}

func TestStrangersAreNotPeers(t *testing.T) {
	b, first, _ := pair(t, nil)
	stranger := start(t, b, authority(t), "stranger", nil) // it has the database, and an authority of its own
	soon(t, "it knows the others", func() bool { _, mine := stranger.First(); return !mine })
	if status, body, _ := ask(t, stranger, "/sandboxes/"+one); status != 503 {
		t.Errorf("it was let in: %d %s", status, body)
	}
	b.change(func() { b.owners[three] = stranger.Me() })
	soon(t, "the first knows it", func() bool {
		status, body, _ := ask(t, first, "/sandboxes/"+three)
		return status == 503 && strings.Contains(body, "does not answer")
	})
}

func TestTheFirstServerDoesWhatOnlyOneDoes(t *testing.T) {
	b, first, second := pair(t, nil)
	if taken, _ := first.office.terms(); taken != 1 {
		t.Errorf("the first took office %d times", taken)
	}
	if taken, _ := second.office.terms(); taken != 0 {
		t.Errorf("the second took office %d times", taken)
	}
	second.domain.mu.Lock()
	second.domain.failures = 3
	second.domain.mu.Unlock()
	name := first.Me()
	b.change(func() { // the first is taken for dead
		b.all = b.all[1:]
		b.owners[one] = second.Me()
		b.given[second.Me()] = []sandbox.Record{{Sandbox: sandbox.Sandbox{ID: one}}}
	})
	soon(t, "the second takes over and takes office", func() bool { taken, _ := second.office.terms(); return taken == 1 && second.domain.Has(one) })
	soon(t, "the one that was first resigns and has another name", func() bool {
		_, resigned := first.office.terms()
		return resigned == 1 && first.Me() != name && !first.domain.Has(one)
	})
	if status, body, _ := ask(t, first, "/first"); status != 200 || body != "b" {
		t.Errorf("what the first does, asked of the one that was: %d %s", status, body)
	}
	if status, body, _ := ask(t, first, "/sandboxes/"+one); status != 200 || body != "b" {
		t.Errorf("what was taken over, asked of the one that had it: %d %s", status, body)
	}
	first.domain.mu.Lock()
	defer first.domain.mu.Unlock()
	if !slices.Equal(first.domain.names, []string{first.Me()}) {
		t.Errorf("it was told the names %v and has %s", first.domain.names, first.Me())
	}
}

func TestAServerThatDoesNotReachTheDatabaseServesNoSandboxForLong(t *testing.T) {
	b, first, _ := pair(t, nil)
	b.change(func() { b.down = true })
	soon(t, "it refuses its own", func() bool { status, _, _ := ask(t, first, "/sandboxes/"+one); return status == 503 })
	if status, _, _ := ask(t, first, "/sandboxes/"+two); status != 503 {
		t.Errorf("another's: %d", status)
	}
	if status, _, _ := ask(t, first, "/first"); status != 503 {
		t.Errorf("what only the first does: %d", status)
	}
	if status, _, _ := ask(t, first, "/healthz"); status != 200 {
		t.Errorf("its own pages: %d", status)
	}
	b.change(func() { b.down = false })
	soon(t, "it goes on", func() bool { status, body, _ := ask(t, first, "/sandboxes/"+one); return status == 200 && body == "a" })
}

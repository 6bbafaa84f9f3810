package tenants_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/testserver"
)

// patience is how long one request may take before it counts as an answer that never came.
const patience = 90 * time.Second

// things are the names and ids by which requests are written: "$sandbox" in a path or a body is things["sandbox"].
type things map[string]string

// with returns a copy with more things.
func (x things) with(more things) things {
	all := maps.Clone(x)
	maps.Copy(all, more)
	return all
}

// tenant is one of the two, with what it owns.
type tenant struct {
	name, key string
	api       *client.Client
	own       things
	secret    string // is in names, metadata and contents of what the tenant owns, and in no request of the other
	marks     map[string]bool
	knows     map[string]bool // marks of the other that its own requests held
}

// word is a name that only this tenant has.
func (p *tenant) word(what string) string {
	word := what + strings.ToLower(rand.Text())
	p.mark(word)
	return word
}

// mark adds texts that no answer to the other tenant may hold.
func (p *tenant) mark(texts ...string) {
	for _, text := range texts {
		if len(text) >= 8 {
			p.marks[text] = true
		}
	}
}

// world is a server with two tenants.
type world struct {
	*testing.T
	server     *testserver.Server
	a, b       *tenant
	admin      string
	http       *http.Client
	kubernetes string // the URL of the listener of the Kubernetes dialect
	registry   string // host:port of an image registry that both may use
}

// newWorld starts a server, makes two tenants, and gives both the same kinds of things.
func newWorld(t *testing.T, env ...string) *world {
	t.Helper()
	requireTenants(t)
	w := &world{T: t, registry: newRegistry(t)}
	w.server = testserver.New(t, append(env, "COVE_IMAGES_INSECURE_REGISTRIES="+w.registry)...)
	w.admin = w.server.Key
	w.http = &http.Client{
		Transport: &http.Transport{
			TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the certificate is not what is tested
			MaxIdleConnsPerHost: 64,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(w.http.CloseIdleConnections)
	w.a, w.b = w.newTenant("anna"), w.newTenant("bert")
	access, err := w.a.api.Kubernetes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.kubernetes = access.Server
	return w
}

func (w *world) newTenant(name string) *tenant {
	w.Helper()
	key, err := w.server.CreateKey(w.Context(), client.KeyRequest{Tenant: name, Name: name})
	if err != nil {
		w.Fatal(err)
	}
	api, err := client.New(w.server.URL, key.Secret)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(api.Close)
	p := &tenant{name: name, key: key.Secret, api: api, secret: name + strings.ToLower(rand.Text()), marks: map[string]bool{}, knows: map[string]bool{}}
	p.own = things{"key_id": key.ID, "tenant": name, "api_key": key.Secret, "secret": p.secret}
	p.mark(p.secret, key.ID, key.Secret)
	return p
}

// request is an HTTP request whose texts hold names of things.
type request struct {
	method, base, path string
	header             map[string]string
	body               string
}

// reply is the answer to a request, or the beginning of one that does not end.
type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

func (r reply) String() string {
	if r.err != nil {
		return r.err.Error()
	}
	return fmt.Sprintf("%d %s", r.status, strings.TrimSpace(r.body[:min(len(r.body), 400)]))
}

func (r reply) ok() bool {
	return r.err == nil && (r.status/100 == 2 || r.status == http.StatusSwitchingProtocols)
}

// maxReply is how much of an answer is read.
const maxReply = 4 << 20

// do sends a request with all names filled in. Of an answer that streams without end it reads the first bytes.
func (w *world) do(r request, fill func(string) string) reply {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	body := os.Expand(r.body, fill)
	if r.header["Content-Type"] == framed {
		body = frames(body)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, r.base+os.Expand(r.path, fill), strings.NewReader(body))
	if err != nil {
		w.Fatal(err)
	}
	for name, value := range r.header {
		if value = os.Expand(value, fill); value != "" {
			req.Header.Set(name, value)
		}
	}
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
	}
	resp, err := w.http.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	out := reply{status: resp.StatusCode, header: resp.Header}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return out
	}
	var text bytes.Buffer
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(&text, io.LimitReader(resp.Body, maxReply))
		done <- err
	}()
	if r.header[endless] != "" && resp.StatusCode/100 == 2 {
		cancel()
		<-done
		return out
	}
	out.err = <-done
	out.body = text.String()
	return out
}

// framed is the type of a stream of Connect: each line of the body is one of its messages.
const framed = "application/connect+json"

func frames(lines string) string {
	var out bytes.Buffer
	for line := range strings.SplitSeq(lines, "\n") {
		out.WriteByte(0)
		_ = binary.Write(&out, binary.BigEndian, uint32(len(line)))
		out.WriteString(line)
	}
	return out.String()
}

// endless is a header of requests whose answers go on until the client leaves.
const endless = "X-Endless"

// filler fills in names: those that begin with my_ from the sender's things, the rest from what the request is about.
func filler(t *testing.T, sender *tenant, about things) func(string) string {
	return func(name string) string {
		from := about
		if mine, ok := strings.CutPrefix(name, "my_"); ok {
			name, from = mine, sender.own
		}
		value, ok := from[name]
		if !ok {
			t.Errorf("nothing is called %q", name)
		}
		return value
	}
}

// named are the names of things that a request is about: not the sender's own, and no versions.
func (r request) named() (names []string) {
	seen := map[string]bool{}
	note := func(name string) string {
		if !strings.HasPrefix(name, "my_") && !strings.HasPrefix(name, "raw_") && !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
		return ""
	}
	for _, text := range append([]string{r.path, r.body}, slices.Sorted(maps.Values(r.header))...) {
		os.Expand(text, note)
	}
	return names
}

var (
	digits = regexp.MustCompile(`^[0-9]+$`)
	hexes  = regexp.MustCompile(`^[0-9a-f-]{16,}$`)
)

// ghost is a name of the same form that was never given out.
func ghost(value string) string {
	alphabet := "abcdefghijklmnopqrstuvwxyz0123456789"
	switch {
	case digits.MatchString(value):
		return "4194000"
	case hexes.MatchString(value):
		alphabet = "0123456789abcdef"
	}
	draw := make([]byte, len(value))
	_, _ = rand.Read(draw)
	out := []byte(value)
	for i, c := range out {
		if c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			out[i] = alphabet[int(draw[i])%len(alphabet)]
		}
	}
	if len(out) > 0 && out[0] >= '0' && out[0] <= '9' && value[0] >= 'a' {
		out[0] = value[0] // names of some kinds begin with a letter
	}
	return string(out)
}

// volatileFields are what changes in A's view of its own things without anybody's doing.
var volatileFields = regexp.MustCompile(`"(last_?[uU]sed(At)?|deadline|cpu_ms|memory_bytes|peak_bytes|disk_bytes|used_bytes|pids|resourceVersion|url|url_expires|lastSpawnedAt|spawnCount|endAt|expiresAt|diskUsed|memUsed)": ?("[^"]*"|[0-9.e+-]+),?`)

// state is all that a tenant can see of its things, without what changes by itself. A sandbox that
// the tenant has ended may still be stopping, so state waits until none is.
func (w *world) state(p *tenant) map[string]string {
	w.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		out, ending := w.stateNow(p)
		if ending == "" {
			return out
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s: a sandbox is still stopping: %s", p.name, ending)
		}
	}
}

// stateNow is state at this moment, with what shows that a sandbox is stopping.
func (w *world) stateNow(p *tenant) (out map[string]string, ending string) {
	w.Helper()
	out = map[string]string{}
	look := func(dialect, path string) string {
		r := w.do(request{"GET", w.base(dialect), path, credentials(dialect), ""}, filler(w.T, p, nil))
		if r.status == http.StatusGone {
			ending = path
		} else if !r.ok() {
			w.Fatalf("%s cannot look at its own things: GET %s: %v", p.name, path, r)
		}
		out[dialect+" "+path] = volatileFields.ReplaceAllString(r.body, "")
		return r.body
	}
	var boxes client.SandboxList
	decode(w.T, look("cove", "/cove/v1/sandboxes?state=starting&state=running&state=paused&state=stopping&limit=100"), &boxes)
	for _, sb := range boxes.Sandboxes {
		if sb.State == "stopping" {
			ending = sb.ID
		}
		if sb.State == "running" {
			at := "/cove/v1/sandboxes/" + sb.ID
			look("cove", at+"/processes")
			look("cove", at+"/kernels")
			look("cove", at+"/files/list?path=.&depth=4")
		}
	}
	var sessions client.SessionList
	decode(w.T, look("cove", "/cove/v1/sessions"), &sessions)
	for _, s := range sessions.Sessions {
		at := "/cove/v1/sessions/" + s.Key
		look("cove", at+"/log")
		look("cove", at+"/checkpoints")
		look("cove", at+"/datasets")
	}
	for _, path := range []string{"/events", "/artifacts", "/volumes", "/templates", "/images", "/registries"} {
		look("cove", "/cove/v1"+path)
	}
	look("e2b", "/templates")
	look("e2b", "/snapshots")
	look("opensandbox", "/v1/sandboxes")
	look("opensandbox", "/v1/snapshots")
	for _, kind := range kubernetesKinds {
		look("kubernetes", "/apis/"+kind.group+"/v1beta1/"+kind.resource)
	}
	keys := w.do(request{"GET", w.server.URL, "/cove/v1/keys?tenant=" + p.name, map[string]string{"Authorization": "Bearer " + w.admin}, ""}, nil)
	out["keys"] = volatileFields.ReplaceAllString(keys.body, "")
	return out, ending
}

// living are the sandboxes of a tenant.
func (w *world) living(p *tenant) (ids []string) {
	w.Helper()
	for sb, err := range p.api.List(w.Context(), client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}, Limit: 100}) {
		if err != nil {
			w.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	return ids
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v in %.300s", err, text)
	}
}

// changes are the differences of two states.
func changes(before, after map[string]string) (list []string) {
	labels := maps.Clone(before)
	maps.Copy(labels, after)
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		was, is := before[label], after[label]
		if was == is {
			continue
		}
		i := 0
		for i < len(was) && i < len(is) && was[i] == is[i] {
			i++
		}
		from := max(0, i-80)
		list = append(list, fmt.Sprintf("%s: was …%.240s…, is …%.240s…", label, was[min(from, len(was)):], is[min(from, len(is)):]))
	}
	return list
}

// eventually waits until something is so.
func (w *world) eventually(what string, is func() error) {
	w.Helper()
	var err error
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if err = is(); err == nil {
			return
		}
		if time.Now().After(deadline) || w.Context().Err() != nil {
			w.Fatalf("%s: %v", what, err)
		}
	}
}

var errNotYet = errors.New("not yet")

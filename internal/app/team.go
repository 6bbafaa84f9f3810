package app

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/dialect/agentsandbox/router"
	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fleet"
	"github.com/covehq/cove/internal/sandbox"
)

// team is this server together with the others of its database.
type team struct {
	fleet    *fleet.Fleet
	identity *fleet.Identity
	listener net.Listener
	doors    map[string]http.Handler
	open     *opensandbox.API
}

// The doors of a server.
const (
	doorMain       = "main"
	doorKubernetes = "kubernetes"
)

// listenPeers takes the address for the other servers; nil: there are none.
func (s *Server) listenPeers() (net.Listener, error) {
	address := s.cfg.PeerListen()
	if address == "" {
		return nil, nil
	}
	l, err := s.bind(address, "server.peer_listen =")
	if err != nil {
		return nil, err
	}
	return s.limiter.TotalOnly(l), nil // one server brings many clients
}

// joinTeam enters this server among the others of its database. It leaves them last of all that uses sandboxes.
func (s *Server) joinTeam(ctx context.Context, l net.Listener) error {
	if l == nil {
		return nil
	}
	fresh, err := fleet.NewAuthority()
	if err != nil {
		return err
	}
	shared, err := s.store.Secret(ctx, "peers", fresh)
	if err != nil {
		return err
	}
	t := &team{listener: l, doors: map[string]http.Handler{}}
	if t.identity, err = fleet.OpenIdentity(shared); err != nil {
		return err
	}
	at := s.cfg.Server.PeerURL
	if at == "" {
		at = "https://" + reachable(l.Addr().(*net.TCPAddr))
	}
	cfg := pace
	cfg.URL, cfg.LastWords = at, farewell
	if t.fleet, err = fleet.Join(ctx, cfg, s.store, t.identity, s.log); err != nil {
		return err
	}
	s.undo.add("leave the other servers", t.fleet.Leave)
	s.team = t
	return nil
}

// pace is how soon servers miss each other; tests are less patient.
var pace fleet.Config

// reachable is an address for others: that of this machine where the listener takes all of them.
func reachable(at *net.TCPAddr) string {
	ip := at.IP
	if ip.IsUnspecified() {
		ip = net.IPv4(127, 0, 0, 1)
		addresses, _ := net.InterfaceAddrs() // without any there is this machine alone
		for _, a := range addresses {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				ip = n.IP
				break
			}
		}
	}
	return net.JoinHostPort(ip.String(), strconv.Itoa(at.Port))
}

func (t *team) me() string {
	if t == nil {
		return ""
	}
	return t.fleet.Me()
}

// watches has OpenSandbox see to what is taken over.
func (t *team) watches(open *opensandbox.API) {
	if t != nil {
		t.open = open
	}
}

// beginFor is how long a server waits before it serves, until what an earlier one left is its own.
const beginFor = 30 * time.Second

// startTeam begins what falls to this server among the others. It returns when there is nothing left to take over.
func (s *Server) startTeam(ctx context.Context, m *sandbox.Manager) error {
	if s.team == nil {
		return nil
	}
	s.startup.Say("what another server left is being taken over")
	life, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	begun, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		s.team.fleet.Work(life, heirs{m, s.team.open}, s.desk, func() { close(begun) })
	}()
	s.undo.add("end the work among servers", func() error { cancel(); <-done; return nil })
	late := time.NewTimer(beginFor)
	defer late.Stop()
	select {
	case <-begun:
	case <-late.C:
		s.log.Warn("not everything that another server left is taken over yet; serving what there is")
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// heirs are the domain and who must hear of what it takes over.
type heirs struct {
	*sandbox.Manager
	open *opensandbox.API
}

func (h heirs) TakeOver(ctx context.Context, records []sandbox.Record) error {
	if len(records) == 0 {
		return nil
	}
	if err := h.Manager.TakeOver(ctx, records); err != nil {
		return err
	}
	h.open.Adopt()
	return nil
}

// servePeers answers the other servers.
func (s *Server) servePeers(base context.Context) {
	t := s.team
	if t == nil {
		return
	}
	t.doors[doorMain] = s.tracing.Handler(s.gateways[0])
	if len(s.gateways) > 1 {
		t.doors[doorKubernetes] = s.tracing.Handler(s.gateways[1])
	}
	server := s.newHTTP(base, s.gateways[0])
	server.Handler = s.limiter.Handler(s.bodies.Handler(t.fleet.Peers(t.doors)))
	s.http = append(s.http, server)
	go func() { s.served <- server.Serve(tls.NewListener(t.listener, t.identity.Server())) }()
}

// byTheFirst are paths of what is in one server's memory or files.
var byTheFirst = []string{
	cove.Prefix + "/sessions", cove.Prefix + "/artifacts", cove.Prefix + "/artifact-keys", cove.Prefix + "/kubernetes", "/artifacts", "/agents",
	"/templates", "/v2/templates", "/v3/templates", "/default-templates", "/snapshots", "/v1/snapshots",
}

func first(r *http.Request) bool {
	if r.Header.Get("X-Sandbox-Id") != "" && !strings.HasPrefix(r.URL.Path, cove.Prefix+"/") {
		return true
	}
	for _, prefix := range byTheFirst {
		if r.URL.Path == prefix || strings.HasPrefix(r.URL.Path, prefix+"/") {
			return true
		}
	}
	return false
}

// elsewhere is who answers instead of this server; nil: there is nobody else.
func (t *team) elsewhere() func(*http.Request) http.Handler {
	if t == nil {
		return nil
	}
	return t.fleet.Elsewhere(fleet.Door{Name: doorMain, Native: cove.Prefix + "/", First: first, Lost: lost})
}

// lost answers for a server that is gone and had begun with what must not be done twice: clients of agent-sandbox send a command again when
// they hear that they should try again.
func lost(w http.ResponseWriter, r *http.Request, message string) bool {
	if !router.Executes(r) {
		return false
	}
	runtime.Lost(w, message)
	return true
}

// elsewhereFacade is the same for the façade, of which all but the server's own pages is the first server's.
func (t *team) elsewhereFacade() func(*http.Request) http.Handler {
	if t == nil {
		return nil
	}
	return t.fleet.Elsewhere(fleet.Door{Name: doorKubernetes, Refuse: func(w http.ResponseWriter, message string) { tellKubernetes(w, message) },
		First: func(r *http.Request) bool {
			return r.URL.Path != "/healthz" && r.URL.Path != "/readyz" && r.URL.Path != "/metrics"
		}})
}

func refuseKubernetes(w http.ResponseWriter, _ *http.Request) {
	tellKubernetes(w, "the server that did this is gone; another takes over, try again")
}

// tellKubernetes says that a client of Kubernetes should try again.
func tellKubernetes(w http.ResponseWriter, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", "2")
	w.WriteHeader(http.StatusServiceUnavailable)
	_ = json.NewEncoder(w).Encode(map[string]any{ // else the client has gone: nobody to tell
		"kind": "Status", "apiVersion": "v1", "metadata": map[string]string{}, "status": "Failure", "reason": "ServiceUnavailable",
		"code": http.StatusServiceUnavailable, "message": message, "details": map[string]int{"retryAfterSeconds": 2},
	})
}

// deskRouter is the router of agent-sandbox wherever it is: requests that are its own are known by what they say.
type deskRouter struct{ http.Handler }

func (deskRouter) Matches(r *http.Request) bool {
	return r.Header.Get("X-Sandbox-Id") != "" || strings.HasPrefix(r.URL.Path, "/agents/")
}

func (d deskRouter) Enters(r *http.Request) bool { return d.Matches(r) }

// farewell ends a stream whose server is gone in the words of its dialect.
func farewell(r *http.Request, mediaType, message string) []byte {
	var events []any
	end := "\n"
	switch {
	case mediaType == "application/x-ndjson" && strings.HasPrefix(r.URL.Path, cove.Prefix+"/"):
		events = []any{client.Event{Type: client.EventFault, Fault: &client.Fault{Kind: "unavailable", Message: message}}}
	case mediaType == "application/x-ndjson" && strings.HasSuffix(r.URL.Path, "/execute") && forPort(r, target.PortInterpreter):
		events = []any{map[string]string{"type": "error", "name": "ExecutionAborted", "value": message}, map[string]string{"type": "end_of_execution"}}
	case mediaType == "text/event-stream" && strings.Contains(r.URL.Path, "/proxy/"+strconv.Itoa(access.PortExecd)+"/"):
		events, end = []any{map[string]any{
			"type": "error", "timestamp": time.Now().UnixMilli(), "error": map[string]any{"ename": "ServerGone", "evalue": message, "traceback": []string{}},
		}}, "\n\n"
	}
	var text []byte
	for _, e := range events {
		line, err := json.Marshal(e)
		if err != nil {
			return nil
		}
		text = append(append(text, line...), end...)
	}
	return text
}

// forPort tells whether a request of E2B's data plane is for a port.
func forPort(r *http.Request, port int) bool {
	text := strconv.Itoa(port)
	return strings.HasPrefix(r.Host, text+"-") || r.Header.Get("E2b-Sandbox-Port") == text || strings.Contains(r.URL.Path, "/"+text+"/")
}

// shareAuthority gives all servers of a database the same authority, since clients trust one: the first server's. One that is near
// its end is replaced by whoever sees it first.
func (s *Server) shareAuthority(dir, domain string, also ...string) error {
	if s.team == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	own, err := ownAuthority(dir, domain, also...)
	if err != nil {
		return err
	}
	name := "authority of " + domain + " " + url.QueryEscape(strings.Join(also, ","))
	// Done before anybody could want it to stop.
	shared, err := s.store.Secret(context.Background(), name, own)
	if err != nil || bytes.Equal(shared, own) {
		return err
	}
	if err := keepAuthority(dir, shared); err != nil {
		return err
	}
	fresh, err := ownAuthority(dir, domain, also...)
	if err != nil || bytes.Equal(fresh, shared) {
		return err
	}
	if shared, err = s.store.SwapSecret(context.Background(), name, shared, fresh); err != nil || bytes.Equal(shared, fresh) {
		return err
	}
	return keepAuthority(dir, shared)
}

// ownAuthority is what a directory has, made anew where that is missing or old.
func ownAuthority(dir, domain string, also ...string) ([]byte, error) {
	if _, err := loadAuthority(dir, domain, time.Now(), also...); err != nil {
		return nil, err
	}
	cert, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(dir, "ca.key"))
	if err != nil {
		return nil, err
	}
	return append(append(cert, separator...), key...), nil
}

// keepAuthority puts another one into a directory.
func keepAuthority(dir string, shared []byte) error {
	cert, key, ok := bytes.Cut(shared, []byte(separator))
	if !ok {
		return errors.New("what the database has as the servers' authority cannot be read")
	}
	for _, stale := range []string{"cert.pem", "ca.pem"} { // a start that is cut short makes what is missing
		if err := os.Remove(filepath.Join(dir, stale)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := writeFile(filepath.Join(dir, "ca.key"), key, 0o600); err != nil {
		return fmt.Errorf("keep the servers' authority: %w", err)
	}
	return writeFile(filepath.Join(dir, "ca.pem"), cert, 0o600)
}

// separator is between certificate and key.
const separator = "\n\x00\n"

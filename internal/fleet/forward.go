package fleet

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// headerVia tells a server what the one before it knew of a request. It counts on the listener of servers alone, where nobody else
// comes; what a caller sends under this name is replaced or never read.
const headerVia = "Cove-Via"

// domainOfPeers is below which servers have names, in certificates and nowhere else.
const domainOfPeers = ".peer.cove"

const (
	// dialFor bounds a connection. The other host's kernel makes it, however busy its processes
	// are. So a connection that takes longer leads to a host that is gone or cut off, and the
	// caller is to know soon.
	dialFor = 3 * time.Second
	// handshakeFor bounds what the other server itself does for a connection.
	handshakeFor = 15 * time.Second
	// idleFor is less than a server keeps a connection, so that no request meets its end.
	idleFor = 90 * time.Second
)

// newTransport connects to servers by their names. One connection carries one request: streams and upgrades are most of them.
func (f *Fleet) newTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: dialFor, KeepAlive: 15 * time.Second}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			at, err := f.address(address)
			if err != nil {
				return nil, err
			}
			return dialer.DialContext(ctx, network, at)
		},
		TLSClientConfig:     f.identity.client(),
		TLSHandshakeTimeout: handshakeFor, ExpectContinueTimeout: 5 * time.Second, IdleConnTimeout: idleFor,
		MaxIdleConnsPerHost: 128, DisableCompression: true, MaxResponseHeaderBytes: 1 << 20,
	}
}

// address is where a server is, by its name.
func (f *Fleet) address(name string) (string, error) {
	host, _, err := net.SplitHostPort(name)
	if err != nil {
		return "", err
	}
	one, ok := f.member(strings.TrimSuffix(host, domainOfPeers))
	if !ok {
		return "", fmt.Errorf("server %s is gone", host)
	}
	u, err := url.Parse(one.URL)
	if err != nil {
		return "", err
	}
	return u.Host, nil
}

// forward passes a request on to another server, with everything that the caller sent.
func (f *Fleet) forward(to sandbox.Server, d Door, later func(string) http.Handler) http.Handler {
	proxy := &httputil.ReverseProxy{
		Transport: f.peers, FlushInterval: -1, BufferPool: buffers, ErrorLog: slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
		Rewrite: func(pr *httputil.ProxyRequest) {
			in := pr.In
			pr.Out.URL.Scheme, pr.Out.URL.Host = "https", to.ID+domainOfPeers
			pr.Out.URL.RawQuery, pr.Out.Host = in.URL.RawQuery, in.Host
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if values := in.Header.Values(name); len(values) > 0 {
					pr.Out.Header[name] = slices.Clone(values)
				}
			}
			pr.Out.Header.Set(headerVia, via{Door: d.Name, Remote: in.RemoteAddr, TLS: in.TLS != nil}.text())
		},
		ModifyResponse: func(resp *http.Response) error {
			resp.Header.Del("X-Request-Id") // ours is there already, and the same
			if resp.StatusCode != http.StatusSwitchingProtocols {
				resp.Body = f.epilogue(resp)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil && !errors.Is(context.Cause(r.Context()), errGone) {
				panic(http.ErrAbortHandler) // nobody is there to be told
			}
			if r.Body != nil && r.Body != http.NoBody && r.ProtoMajor == 1 {
				w.Header().Set("Connection", "close") // what is left of the body must not be taken for the next request
			}
			f.log.Warn("a request was not passed on", "server", to.ID, "error", err)
			f.owners.clear()
			if d.Lost != nil && wasSent(r) && d.Lost(w, r, "the server of this sandbox is gone") {
				return
			}
			later("the server of this sandbox does not answer; try again").ServeHTTP(w, r)
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// When an answer begins, the server closes the body of its request. The transport, which may still read that, would break the
		// answer off.
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 has it anyway
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(f.whileAlive(to.ID), func() { cancel(errGone) })()
		proxy.ServeHTTP(w, r.WithContext(watchSent(ctx)))
	})
}

type sentKey struct{}

// watchSent remembers whether a request with this context was sent to a server, which may then have begun with it.
func watchSent(ctx context.Context) context.Context {
	sent := new(atomic.Bool)
	ctx = context.WithValue(ctx, sentKey{}, sent)
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
}

func wasSent(r *http.Request) bool {
	sent, ok := r.Context().Value(sentKey{}).(*atomic.Bool)
	return ok && sent.Load()
}

// errGone ends what was passed on to a server that is gone.
var errGone = errors.New("the server is gone")

// via is what is lost on the way from one server to another.
type via struct {
	Door, Remote string
	TLS          bool
}

func (v via) text() string {
	values := url.Values{"door": {v.Door}, "remote": {v.Remote}}
	if v.TLS {
		values.Set("tls", "1")
	}
	return values.Encode()
}

func parseVia(text string) (v via, err error) {
	values, err := url.ParseQuery(text)
	return via{Door: values.Get("door"), Remote: values.Get("remote"), TLS: values.Get("tls") != ""}, err
}

type forwardedKey struct{}

func isForwarded(r *http.Request) bool { return r.Context().Value(forwardedKey{}) != nil }

// Peers answers on the listener of servers: each request as if it had come through its door. None is passed on again.
func (f *Fleet) Peers(doors map[string]http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, err := parseVia(r.Header.Get(headerVia))
		door := doors[v.Door]
		if err != nil || door == nil {
			Refuse(w, "this server does not know what another one wants of it; they may be of different versions, try again later")
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), forwardedKey{}, true))
		r.Header.Del(headerVia)
		r.RemoteAddr, r.TLS = v.Remote, nil
		if v.TLS {
			r.TLS = &tls.ConnectionState{}
		}
		door.ServeHTTP(w, r)
	})
}

// Refuse says that the caller should try again, in the words of every dialect.
func Refuse(w http.ResponseWriter, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", "2")
	w.WriteHeader(http.StatusServiceUnavailable)
	_ = json.NewEncoder(w).Encode(map[string]any{ // else the client has gone: nobody to tell
		"code": "unavailable", "message": message, "detail": message, "error": map[string]string{"kind": "unavailable", "message": message},
	})
}

var buffers = &bufferPool{sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}}

type bufferPool struct{ sync.Pool }

func (p *bufferPool) Get() []byte  { return *p.Pool.Get().(*[]byte) }
func (p *bufferPool) Put(b []byte) { p.Pool.Put(&b) }

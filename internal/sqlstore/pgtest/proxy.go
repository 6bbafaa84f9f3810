package pgtest

import (
	"io"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"testing"
)

// Proxy stands between a store and its Postgres. While it is stalled it accepts connections and
// forwards nothing, as a Postgres whose host hangs.
type Proxy struct {
	URL string // of the same database, through the proxy

	target string
	conns  sync.WaitGroup

	mu   sync.Mutex
	open chan struct{} // closed: it forwards
	all  map[net.Conn]bool
}

// NewProxy makes a proxy to the database of a URL that names a socket's directory. It ends with the
// test.
func NewProxy(t testing.TB, dsn string) *Proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	const socket = ".s.PGSQL.5432"
	q, dir := u.Query(), t.TempDir()
	p := &Proxy{target: filepath.Join(q.Get("host"), socket), open: make(chan struct{}), all: map[net.Conn]bool{}}
	close(p.open)
	l, err := net.Listen("unix", filepath.Join(dir, socket))
	if err != nil {
		t.Fatal(err)
	}
	q.Set("host", dir)
	u.RawQuery = q.Encode()
	p.URL = u.String()
	p.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.conns.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.Resume()
		p.mu.Lock()
		for c := range p.all {
			c.Close()
		}
		p.mu.Unlock()
		p.conns.Wait()
	})
	return p
}

// Stall lets nothing through until Resume.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = make(chan struct{})
}

// Resume forwards again, first what came while the proxy was stalled.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
	default:
		close(p.open)
	}
}

func (p *Proxy) wait() {
	p.mu.Lock()
	open := p.open
	p.mu.Unlock()
	<-open
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("unix", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	p.all[client], p.all[server] = true, true
	p.mu.Unlock()
	var both sync.WaitGroup
	for from, to := range map[net.Conn]net.Conn{client: server, server: client} {
		both.Go(func() {
			_, _ = io.Copy(gate{to, p}, from) // it ends with one of the connections
			to.Close()
		})
	}
	both.Wait()
	p.mu.Lock()
	delete(p.all, client)
	delete(p.all, server)
	p.mu.Unlock()
}

// A gate waits before each write while its proxy is stalled.
type gate struct {
	net.Conn
	proxy *Proxy
}

func (g gate) Write(b []byte) (int, error) {
	g.proxy.wait()
	return g.Conn.Write(b)
}

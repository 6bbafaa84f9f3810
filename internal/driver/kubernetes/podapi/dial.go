package podapi

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// Client is one server among those that command Pods.
type Client struct {
	authority *Authority
	name      string

	mu          sync.Mutex
	certificate *tls.Certificate
	made        time.Time
}

// NewClient makes a client with a certificate of its own.
func NewClient(a *Authority, name string) *Client { return &Client{authority: a, name: name} }

// Authority is who stands behind it.
func (c *Client) Authority() *Authority { return c.authority }

// own is the client's certificate, which is made again long before its end.
func (c *Client) own(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.certificate == nil || time.Since(c.made) > serverLife/2 {
		made, err := c.authority.Server(c.name)
		if err != nil {
			return nil, err
		}
		c.certificate, c.made = &made, time.Now()
	}
	return c.certificate, nil
}

// Pod is where one Pod is, and what was learned from it.
type Pod struct {
	Name    string
	Address string // host:port

	once     sync.Once
	sessions tls.ClientSessionCache
}

func (p *Pod) cache() tls.ClientSessionCache {
	p.once.Do(func() { p.sessions = tls.NewLRUClientSessionCache(2) })
	return p.sessions
}

// handshakeFor bounds how long a Pod may take to show who it is.
const handshakeFor = 10 * time.Second

// ErrRefused is a Pod that cannot be connected to: it does not listen yet, or is no more.
var ErrRefused = errors.New("nobody answers at the Pod's address")

// dial opens a connection and has the Pod prove itself.
func (c *Client) dial(ctx context.Context, p *Pod, purpose byte) (net.Conn, error) {
	token, err := hex.DecodeString(c.authority.Token(p.Name))
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", p.Address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if tcp, ok := raw.(*net.TCPConn); ok {
		raw = firmConn{tcp}
	}
	conn := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS13, GetClientCertificate: c.own, ClientSessionCache: p.cache(), ServerName: p.Name,
		// A Pod's certificate is its own work and says nothing. What it proves is that it has the token.
		InsecureSkipVerify: true,
	})
	if err := c.greet(ctx, conn, token, purpose); err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

func (c *Client) greet(ctx context.Context, conn *tls.Conn, token []byte, purpose byte) error {
	ctx, cancel := context.WithTimeout(ctx, handshakeFor)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("TLS with the Pod: %w", err)
	}
	deadline, _ := ctx.Deadline() // it has one
	_ = conn.SetDeadline(deadline)
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if err := check(conn, token); err != nil {
		return err
	}
	if _, err := conn.Write([]byte{purpose}); err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// Agent opens a connection that carries one operation of agentapi.
func (c *Client) Agent(ctx context.Context, p *Pod) (net.Conn, error) {
	return c.dial(ctx, p, ForAgent)
}

// Do has a Pod carry out an order and reads its answer into value, unless that is nil. What the Pod refuses is its fault; every other error is of
// the way to it.
func (c *Client) Do(ctx context.Context, p *Pod, o Order, value any) error {
	conn, err := c.dial(ctx, p, ForControl)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := agentapi.WriteJSON(conn, agentapi.FrameRequest, o); err != nil {
		return way(ctx, err)
	}
	f, err := agentapi.NewReader(bufio.NewReader(conn)).Read()
	if err != nil {
		return way(ctx, err)
	}
	var end agentapi.End
	if f.Kind != agentapi.FrameEnd || json.Unmarshal(f.Payload, &end) != nil {
		return fault.New(fault.Internal, "the Pod %s does not speak this protocol", p.Name)
	}
	if err := answerError(end); err != nil {
		return err
	}
	if value == nil {
		return nil
	}
	return json.Unmarshal(end.Value, value)
}

// way is an error of the connection; whoever gave up says why.
func way(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("connection to the Pod: %w", err)
}

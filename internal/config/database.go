package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"time"
)

// Server says what this server is among others.
type Server struct {
	Replicas int `toml:"replicas"` // servers that share their state, this one among them; more than one needs Postgres
	// PeerListen is where the other servers reach this one: host:port. Empty: the host of listen, port 7446 (or 0 where listen has 0).
	PeerListen string `toml:"peer_listen"`
	PeerURL    string `toml:"peer_url"` // how they reach it; empty: by the address of this machine
	// SharedVolume says that data_dir is a volume which all servers have. Sessions, artifacts and datasets are files and need it.
	SharedVolume bool `toml:"shared_volume"`

	// MaxConnections is for all listeners together. Zero: half of the process's file descriptors, at most 16384.
	MaxConnections           int `toml:"max_connections"`
	MaxConnectionsPerAddress int `toml:"max_connections_per_address"` // of an IPv4 address or a /64 of IPv6; zero: half of max_connections
	// TrustedProxies are addresses or prefixes of proxies in front of this server. Each stands for many clients and has no share.
	TrustedProxies []string `toml:"trusted_proxies"`
	// InsecureHTTP lets other machines speak plain HTTP to the listener without TLS.
	InsecureHTTP bool `toml:"insecure_http"`
	// StallTimeout is how long a client may take nothing of an answer before it is cut off.
	StallTimeout time.Duration `toml:"stall_timeout"`
}

// ParsePrefix reads an address, or a prefix of addresses.
func ParsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	return p.Masked(), err
}

func (s Server) validateConnections() error {
	if s.MaxConnections < 0 || s.MaxConnectionsPerAddress < 0 || s.StallTimeout < 0 {
		return errors.New("server.max_connections, server.max_connections_per_address and server.stall_timeout cannot be negative")
	}
	for _, text := range s.TrustedProxies {
		if _, err := ParsePrefix(text); err != nil {
			return fmt.Errorf("server.trusted_proxies: %q is neither an address nor a prefix such as 10.0.0.0/8", text)
		}
	}
	return nil
}

// PlainEverywhere tells whether every machine may speak plain HTTP to this server. An operator who lets
// every machine in without a key has nothing to keep from the network.
func (c Config) PlainEverywhere() bool {
	return c.Server.InsecureHTTP || c.Auth.Anonymous && c.Auth.Everywhere
}

// PlainListen is where the listener without TLS is. Beside a TLS listener it stays on loopback, unless
// the operator lets other machines or a proxy use it.
func (c Config) PlainListen() string {
	host, port, _ := net.SplitHostPort(c.Listen) // validated
	if c.TLSListen() == "" || c.PlainEverywhere() || len(c.Server.TrustedProxies) > 0 || loopback(host) {
		return c.Listen
	}
	return net.JoinHostPort("127.0.0.1", port)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// DefaultPeerPort is where servers of one database reach each other.
const DefaultPeerPort = "7446"

// PeerListen is where the listener for other servers is; empty: there are none.
func (c Config) PeerListen() string {
	switch {
	case c.Server.Replicas <= 1:
		return ""
	case c.Server.PeerListen != "":
		return c.Server.PeerListen
	}
	host, port, _ := net.SplitHostPort(c.Listen) // validated
	if port == "0" {
		return net.JoinHostPort(host, "0")
	}
	return net.JoinHostPort(host, DefaultPeerPort)
}

func (s Server) validate() error {
	if err := s.validateConnections(); err != nil {
		return err
	}
	if s.PeerListen != "" {
		if _, _, err := net.SplitHostPort(s.PeerListen); err != nil {
			return fmt.Errorf("server.peer_listen %q: want HOST:PORT", s.PeerListen)
		}
	}
	if s.PeerURL != "" {
		if u, err := url.Parse(s.PeerURL); err != nil || u.Scheme != "https" || u.Port() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
			return fmt.Errorf("server.peer_url %q: want https://HOST:PORT", s.PeerURL)
		}
	}
	if s.SharedVolume && s.Replicas <= 1 {
		return errors.New("server.shared_volume is for several servers: set server.replicas to how many they are")
	}
	return nil
}

// Database says where state is kept that is not bytes of files. Without either it is a SQLite file in the data directory.
type Database struct {
	URL     DatabaseURL `toml:"url"`      // postgres://USER:PASSWORD@HOST:5432/DATABASE
	URLFile string      `toml:"url_file"` // a file that holds the URL, as a mounted secret does
}

// Postgres tells whether state is kept there, which several servers can share.
func (d Database) Postgres() bool { return d.URL != "" || d.URLFile != "" }

// DatabaseURL is a URL with a password, which it does not print.
type DatabaseURL string

// hidden stands for what is not shown.
const hidden = "••••••••"

// String is the URL without what is secret in it.
func (d DatabaseURL) String() string {
	if d == "" {
		return ""
	}
	u, err := url.Parse(string(d))
	if err != nil || u.Opaque != "" || u.Scheme == "" {
		return hidden
	}
	shown := u.Scheme + "://"
	if u.User != nil {
		shown += url.User(u.User.Username()).String()
		if _, has := u.User.Password(); has {
			shown += ":" + hidden
		}
		shown += "@"
	}
	shown += u.Host + u.EscapedPath()
	if u.RawQuery != "" {
		shown += "?" + hidden // some of its settings are passwords too
	}
	return shown
}

// GoString is String for %#v.
func (d DatabaseURL) GoString() string { return fmt.Sprintf("%q", d.String()) }

// LogValue is String for logs.
func (d DatabaseURL) LogValue() slog.Value { return slog.StringValue(d.String()) }

// MarshalText is String for JSON.
func (d DatabaseURL) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// IsPostgresURL tells a URL of Postgres from everything else that could be in its place.
func (d DatabaseURL) IsPostgresURL() bool {
	u, err := url.Parse(string(d))
	return err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql")
}

func (c Config) validateDatabase() error {
	d := c.Database
	switch {
	case d.URL != "" && d.URLFile != "":
		return errors.New("database.url and database.url_file: say one of them")
	case d.URL != "" && !d.URL.IsPostgresURL():
		return errors.New("database.url: want postgres://USER:PASSWORD@HOST:5432/DATABASE, with special characters as %XX; leave it out to use SQLite")
	case d.URLFile != "" && !filepath.IsAbs(d.URLFile):
		return fmt.Errorf("database.url_file %q is not an absolute path", d.URLFile)
	case c.Server.Replicas < 0:
		return fmt.Errorf("server.replicas cannot be negative: %d", c.Server.Replicas)
	case c.Server.Replicas > 1 && !d.Postgres():
		return fmt.Errorf("server.replicas = %d needs Postgres: several servers cannot share a SQLite file; set database.url (%s) or database.url_file, or run one server",
			c.Server.Replicas, EnvName("database.url"))
	case c.Server.Replicas > 1 && c.Driver == DriverNative:
		return fmt.Errorf("server.replicas = %d with driver = %s: sandboxes live on the machine of their server, and another server would record "+
			"them as ended while they run; give each server a database of its own and leave server.replicas out, or use driver = %s",
			c.Server.Replicas, DriverNative, DriverKubernetes)
	}
	return c.Server.validate()
}

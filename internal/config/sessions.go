package config

import (
	"errors"
	"fmt"
	"net/url"
	"time"
)

// Artifacts says how long and how much of what runs leave is kept, and how links to it look.
type Artifacts struct {
	PublicURL      string        `toml:"public_url"` // in front of /artifacts/…; empty: this server's own address
	LinkTTL        time.Duration `toml:"link_ttl"`
	MaxFileSize    Size          `toml:"max_file_size"`    // larger files stay in the sandbox and are told
	MaxSessionSize Size          `toml:"max_session_size"` // of one session together; zero: no bound
	MaxTenantSize  Size          `toml:"max_tenant_size"`  // zero: no bound
	Retention      time.Duration `toml:"retention"`        // zero: until somebody removes them
}

// Sessions holds the defaults of sessions.
type Sessions struct {
	IdleTimeout  time.Duration `toml:"idle_timeout"`
	Lifetime     time.Duration `toml:"lifetime"`       // of a sandbox; zero: none
	Size         Size          `toml:"size"`           // of /session
	Retention    time.Duration `toml:"retention"`      // of a session that is not used any more, with its log; zero: until somebody removes it
	MaxPerTenant int           `toml:"max_per_tenant"` // sessions, used or not; zero: any number
	MaxTenantLog Size          `toml:"max_tenant_log"` // of all logs of a tenant's sessions together; zero: no bound
}

// Datasets bounds data that clients stage.
type Datasets struct {
	MaxSize       Size `toml:"max_size"`        // of one
	MaxTenantSize Size `toml:"max_tenant_size"` // zero: no bound
}

// Telemetry says what traces may hold.
type Telemetry struct {
	CaptureOutput bool `toml:"capture_output"` // the beginning of what a run wrote to stderr, which may hold secrets of its owner
}

// maxLinkTTL is the longest that a link holds, whoever asks.
const maxLinkTTL = 7 * 24 * time.Hour

func (a Artifacts) validate() error {
	if a.PublicURL != "" {
		if u, err := url.Parse(a.PublicURL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("artifacts.public_url %q: want a URL such as https://files.example.com", a.PublicURL)
		}
	}
	if a.LinkTTL < time.Second || a.LinkTTL > maxLinkTTL {
		return fmt.Errorf("artifacts.link_ttl %v: a link holds for one second to %d hours", a.LinkTTL, int(maxLinkTTL.Hours()))
	}
	if a.MaxFileSize <= 0 || a.Retention < 0 {
		return errors.New("artifacts: max_file_size must be more than nothing, and retention cannot be negative")
	}
	return nil
}

func (s Sessions) validate() error {
	if s.IdleTimeout < 0 || s.Lifetime < 0 || s.Retention < 0 || s.Size <= 0 || s.MaxPerTenant < 0 || s.MaxTenantLog < 0 {
		return errors.New("sessions: size must be more than nothing, and neither a time, max_per_tenant nor max_tenant_log can be negative")
	}
	return nil
}

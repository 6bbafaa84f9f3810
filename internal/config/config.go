// Package config is everything an operator decides, in one struct: defaults < file < environment < flags, validated
// once. It knows no component; app maps it onto each of them.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// Config is the whole configuration. The zero value is not valid; start from Default.
type Config struct {
	Listen    string `toml:"listen"`     // host:port; port 0 picks one
	DataDir   string `toml:"data_dir"`   // everything the server keeps; locked while it runs
	Driver    string `toml:"driver"`     // native, kubernetes; inproc has no isolation at all and is for tests
	Ephemeral bool   `toml:"-"`          // the server is for one command: what it started ends with it
	ReadyFile string `toml:"ready_file"` // written as JSON (url, api_key, pid) once the server can serve
	// ShutdownGrace is how long running requests may take after SIGTERM.
	ShutdownGrace time.Duration `toml:"shutdown_grace"`

	TLS      TLS      `toml:"tls"`
	Log      Log      `toml:"log"`
	Sandbox  Sandbox  `toml:"sandbox"`
	Network  Network  `toml:"network"`
	Template Template `toml:"template"`
	Auth     Auth     `toml:"auth"`
	Images   Images   `toml:"images"`
	Storage  Storage  `toml:"storage"`

	Artifacts Artifacts `toml:"artifacts"`
	Sessions  Sessions  `toml:"sessions"`
	Datasets  Datasets  `toml:"datasets"`
	Database  Database  `toml:"database"`
	Server    Server    `toml:"server"`
	Telemetry Telemetry `toml:"telemetry"`

	E2B          E2B          `toml:"e2b"`
	AgentSandbox AgentSandbox `toml:"agent_sandbox"`
	Kubernetes   Kubernetes   `toml:"kubernetes"`
}

// TLS is the second listener, which names sandboxes by host: {port}-{id}.{domain}.
type TLS struct {
	Domain string `toml:"domain"` // without it there is no such listener
	Listen string `toml:"listen"` // host:port, or off; empty: the plain listener's host, port 7443 (or 0 where the plain one has 0)
	Cert   string `toml:"cert"`   // PEM file of a certificate for the domain and *.domain; empty: the server makes its own
	Key    string `toml:"key"`
}

// TLSOff is the listen setting of a server whose domain somebody in front of it answers for, on port 443.
const TLSOff = "off"

// DefaultTLSPort is where the TLS listener is that was not told.
const DefaultTLSPort = "7443"

// TLSListen is where the TLS listener is; empty: there is none.
func (c Config) TLSListen() string {
	switch {
	case c.TLS.Domain == "" || c.TLS.Listen == TLSOff:
		return ""
	case c.TLS.Listen != "":
		return c.TLS.Listen
	}
	host, port, _ := net.SplitHostPort(c.Listen) // validated
	if port == "0" {
		return net.JoinHostPort(host, "0")
	}
	return net.JoinHostPort(host, DefaultTLSPort)
}

// domainName is a name of DNS labels, without a port.
var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func (t TLS) validate() error {
	switch {
	case t.Domain == "" && (t.Listen != "" || t.Cert != "" || t.Key != ""):
		return errors.New("tls needs tls.domain: the name under which sandboxes are found, such as cove.localhost")
	case t.Domain == "":
		return nil
	case len(t.Domain) > 180 || !domainName.MatchString(t.Domain) || net.ParseIP(t.Domain) != nil:
		return fmt.Errorf("tls.domain %q is not a domain name in lower case, such as cove.localhost", t.Domain)
	case (t.Cert == "") != (t.Key == ""):
		return errors.New("tls.cert and tls.key belong together")
	}
	if t.Listen == "" || t.Listen == TLSOff {
		return nil
	}
	if _, _, err := net.SplitHostPort(t.Listen); err != nil {
		return fmt.Errorf("tls.listen %q: want HOST:PORT, or %s", t.Listen, TLSOff)
	}
	return nil
}

// E2B is what E2B's SDKs may ask for.
type E2B struct {
	OpenSandboxes bool `toml:"open_sandboxes"` // secure: false makes a sandbox that needs no token
}

// Log says what is logged, and how.
type Log struct {
	Level  string `toml:"level"`  // debug, info, warn, error
	Format string `toml:"format"` // text, json
}

// Sandbox holds defaults and bounds; zero is the domain's own choice where nothing else is said.
type Sandbox struct {
	DefaultTemplate string        `toml:"default_template"`
	DefaultLifetime time.Duration `toml:"default_lifetime"`
	MaxLifetime     time.Duration `toml:"max_lifetime"`
	IdleTimeout     time.Duration `toml:"idle_timeout"`
	PausedLifetime  time.Duration `toml:"paused_lifetime"` // how long a sandbox may stay paused; zero: for ever
	StartTimeout    time.Duration `toml:"start_timeout"`   // how long one sandbox may take to start
	CPUs            float64       `toml:"cpus"`
	Memory          Size          `toml:"memory"`
	Pids            int           `toml:"pids"`
	Disk            Size          `toml:"disk"`
	OpenFiles       int           `toml:"open_files"`
	MaxCPUs         float64       `toml:"max_cpus"`
	MaxMemory       Size          `toml:"max_memory"`
	MaxDisk         Size          `toml:"max_disk"`
	Network         string        `toml:"network"` // internet, none
	MaxPerTenant    int           `toml:"max_per_tenant"`
	CreateRate      float64       `toml:"create_rate"`       // per second and tenant
	MaxEventStreams int           `toml:"max_event_streams"` // of events, and as many of session logs, that a tenant follows
	MaxOperations   int           `toml:"max_operations"`    // of a tenant in sandboxes at the same time: runs, files, watches, port connections
	Retention       time.Duration `toml:"retention"`         // how long an ended sandbox stays readable
	MaxEnded        int           `toml:"max_ended"`         // ended sandboxes of a tenant that stay readable
}

// Template says which templates are made ready at start.
type Template struct {
	Prepare []string `toml:"prepare"` // default: the default template
}

// Size is a number of bytes, written as 512MiB, 1G or 1048576.
type Size int64

var units = []struct {
	suffix string
	bytes  int64
}{{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40}, {"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1}}

// ParseSize reads a number of bytes with or without a unit.
func ParseSize(text string) (Size, error) {
	number, unit := strings.ToLower(strings.TrimSpace(text)), int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !(v >= 0 && v*float64(unit) <= 1<<62) { // so written that NaN is refused too
		return 0, fmt.Errorf("size %q: write it as 512MiB, 1G or a number of bytes", text)
	}
	return Size(v * float64(unit)), nil
}

// UnmarshalText reads a size from a file.
func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// UnmarshalTOML also takes a plain number.
func (s *Size) UnmarshalTOML(v any) error {
	if n, ok := v.(int64); ok && n >= 0 {
		*s = Size(n)
		return nil
	}
	return s.UnmarshalText(fmt.Append(nil, v))
}

func (s Size) String() string {
	for _, u := range []string{"GiB", "MiB", "KiB"} {
		unit := Size(map[string]int64{"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}[u])
		if s >= unit && s%unit == 0 {
			return fmt.Sprintf("%d%s", s/unit, u)
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// DefaultListen is where a server listens that was not told: on this machine only.
// 8080 is where OpenSandbox's clients look for a server.
const DefaultListen = "127.0.0.1:8080"

// Default is what a server does that was told nothing.
func Default() Config {
	return Config{
		Listen: DefaultListen, DataDir: DefaultDataDir(), Driver: "native", ShutdownGrace: 10 * time.Second,
		Log: Log{Level: "info", Format: "text"}, Sandbox: Sandbox{PausedLifetime: 30 * 24 * time.Hour, MaxPerTenant: 4000, MaxEnded: 20_000, MaxEventStreams: 64, MaxOperations: 2048},
		Images:    Images{Map: defaultMap(), MaxFiles: 1_000_000, MaxTenant: 50 << 30, MaxTenantFiles: 5_000_000},
		Artifacts: Artifacts{LinkTTL: 10 * time.Minute, MaxFileSize: 50 << 20, MaxSessionSize: 10 << 30, MaxTenantSize: 50 << 30},
		Sessions:  Sessions{IdleTimeout: 45 * time.Minute, Size: 1 << 30, MaxPerTenant: 100_000, MaxTenantLog: 4 << 30},
		Datasets:  Datasets{MaxSize: 20 << 30, MaxTenantSize: 50 << 30},
		Server:    Server{StallTimeout: 2 * time.Minute},

		AgentSandbox: AgentSandbox{Templates: defaultAgentTemplates()},
		Kubernetes:   defaultKubernetes(),
	}
}

// DefaultDataDir is /var/lib/cove for root and a folder of their own for everybody else.
func DefaultDataDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/cove"
	}
	if d := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "cove")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return filepath.Join(os.TempDir(), "cove-"+strconv.Itoa(os.Geteuid()))
	}
	return filepath.Join(home, ".local", "share", "cove")
}

// systemFile is read when no other file is named and it exists.
const systemFile = "/etc/cove/cove.toml"

// Source is where a configuration comes from.
type Source struct {
	File  string                      // a file that must exist; empty: COVE_CONFIG, else the system's if there is one
	Env   func(string) (string, bool) // os.LookupEnv
	Flags map[string]string           // by dotted name: "data_dir", "log.level"
}

// Load reads every source, the stronger after the weaker, and validates the whole.
func Load(src Source) (Config, error) {
	c := Default()
	if err := c.readFile(src); err != nil {
		return c, err
	}
	c.Auth.Anonymous = c.Auth.Anonymous || insecure(src)
	for name, value := range c.settings() {
		if text, ok := src.Env(EnvName(name)); ok {
			if err := set(value, text); err != nil {
				return c, fmt.Errorf("environment %s: %w", EnvName(name), err)
			}
		}
	}
	settings := c.settings()
	for name, text := range src.Flags {
		if err := set(settings[name], text); err != nil {
			return c, fmt.Errorf("--%s: %w", strings.ReplaceAll(name, "_", "-"), err)
		}
	}
	return c, c.Validate()
}

// EnvName is the environment variable of a setting: data_dir is COVE_DATA_DIR, log.level is COVE_LOG_LEVEL.
func EnvName(setting string) string {
	return "COVE_" + strings.ToUpper(strings.ReplaceAll(setting, ".", "_"))
}

// file is the one that is read, and whether somebody named it.
func (src Source) file() (path string, named bool) {
	if src.File != "" {
		return src.File, true
	}
	if path, named = src.Env("COVE_CONFIG"); named {
		return path, true
	}
	return systemFile, false
}

func (c *Config) readFile(src Source) error {
	path, named := src.file()
	meta, err := toml.DecodeFile(path, c)
	if errors.Is(err, fs.ErrNotExist) && !named {
		return nil
	}
	if err != nil {
		return fmt.Errorf("config file %s: %w", path, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return fmt.Errorf("config file %s: unknown setting %q", path, unknown[0].String())
	}
	return nil
}

// settings are the fields by their dotted names.
func (c *Config) settings() map[string]reflect.Value {
	all := map[string]reflect.Value{}
	collect(all, "", reflect.ValueOf(c).Elem())
	return all
}

func collect(all map[string]reflect.Value, prefix string, v reflect.Value) {
	for i := range v.NumField() {
		name := prefix + v.Type().Field(i).Tag.Get("toml")
		if v.Field(i).Kind() == reflect.Struct {
			collect(all, name+".", v.Field(i))
			continue
		}
		all[name] = v.Field(i)
	}
}

func set(v reflect.Value, text string) error {
	switch p := v.Addr().Interface().(type) {
	case *string:
		*p = text
	case *[]string:
		*p = nil
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				*p = append(*p, part)
			}
		}
	case *int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", text)
		}
		*p = n
	case *float64:
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		*p = n
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a duration: write it as 90s, 5m or 2h", text)
		}
		*p = d
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		*p = b
	case *map[string]string:
		return setMap(p, text)
	case *map[string][]string:
		return setLists(p, text)
	case *Size:
		return p.UnmarshalText([]byte(text))
	case *KubernetesKinds:
		return errors.New("templates are written in the configuration file: [kubernetes.templates.NAME]")
	case *DatabaseURL:
		*p = DatabaseURL(text)
	default:
		panic(fmt.Sprintf("no way to set a %T", p)) // a field of a new type was added without a case here
	}
	return nil
}

// The drivers.
const (
	DriverNative     = "native"
	DriverInproc     = "inproc"
	DriverKubernetes = "kubernetes"
)

// Validate refuses what cannot be meant.
func (c Config) Validate() error {
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("listen %q: want HOST:PORT such as %s", c.Listen, DefaultListen)
	}
	if err := c.TLS.validate(); err != nil {
		return err
	}
	if err := firstError(c.AgentSandbox.validate(), c.validateAuth(), c.Images.validate(), c.Storage.validate(), c.Network.validate(), c.Artifacts.validate(), c.Sessions.validate(), c.validateDatabase(),
		c.Kubernetes.validate(c.Driver == DriverKubernetes)); err != nil {
		return err
	}
	if !filepath.IsAbs(c.DataDir) {
		return fmt.Errorf("data_dir %q is not an absolute path", c.DataDir)
	}
	if !slices.Contains([]string{DriverNative, DriverInproc, DriverKubernetes}, c.Driver) {
		return fmt.Errorf("unknown driver %q: use %s or %s", c.Driver, DriverNative, DriverKubernetes)
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		return fmt.Errorf("unknown log level %q: use debug, info, warn or error", c.Log.Level)
	}
	if !slices.Contains([]string{"text", "json"}, c.Log.Format) {
		return fmt.Errorf("unknown log format %q: use text or json", c.Log.Format)
	}
	if !slices.Contains([]string{"", "internet", "none"}, c.Sandbox.Network) {
		return fmt.Errorf("unknown default network %q: use internet or none", c.Sandbox.Network)
	}
	for name, d := range map[string]time.Duration{
		"shutdown_grace": c.ShutdownGrace, "sandbox.paused_lifetime": c.Sandbox.PausedLifetime, "sandbox.start_timeout": c.Sandbox.StartTimeout,
	} {
		if d < 0 {
			return fmt.Errorf("%s cannot be negative: %v", name, d)
		}
	}
	if c.Sandbox.MaxEventStreams < 1 || c.Sandbox.MaxOperations < 1 {
		return errors.New("sandbox.max_event_streams and sandbox.max_operations must be at least 1")
	}
	return nil
}

// String lists every setting, one per line, without secrets: keys live in the data directory, and a URL hides its password.
func (c Config) String() string {
	settings := c.settings()
	names := make([]string, 0, len(settings))
	for name := range settings {
		names = append(names, name)
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "%s = %v\n", name, settings[name].Interface())
	}
	return b.String()
}

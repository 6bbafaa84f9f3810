package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/config"
)

func none(string) (string, bool) { return "", false }

func from(pairs map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := pairs[name]; return v, ok }
}

func TestFlagsBeatEnvironmentBeatsFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cove.toml")
	text := "listen = '127.0.0.1:1'\ndata_dir = '/one'\n[log]\nlevel = 'warn'\n[sandbox]\nmemory = '1GiB'\ndefault_lifetime = '90s'\nstart_timeout = '20s'\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := config.Load(config.Source{
		File:  file,
		Env:   from(map[string]string{"COVE_DATA_DIR": "/two", "COVE_LOG_LEVEL": "debug", "COVE_SANDBOX_MAX_PER_TENANT": "7", "COVE_SANDBOX_PAUSED_LIFETIME": "0s"}),
		Flags: map[string]string{"data_dir": "/three"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := config.Default()
	want.Listen, want.DataDir, want.Log.Level = "127.0.0.1:1", "/three", "debug"
	want.Sandbox.Memory, want.Sandbox.DefaultLifetime, want.Sandbox.MaxPerTenant = 1<<30, 90*time.Second, 7
	want.Sandbox.StartTimeout, want.Sandbox.PausedLifetime = 20*time.Second, 0
	if got.String() != want.String() {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestWhatCannotBeMeantIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cove.toml")
	for text, says := range map[string]string{
		"lissten = 'x'":                  `unknown setting "lissten"`,
		"listen = 'nowhere'":             "HOST:PORT",
		"driver = 'vm'":                  "unknown driver",
		"data_dir = 'relative'":          "absolute",
		"[sandbox]\nmemory = 'much'":     "512MiB",
		"[sandbox]\nnetwork = 'carrier'": "internet or none",
		"[log]\nlevel = 'loud'":          "unknown log level",

		"[network]\nmax_mode = 'lan'":                      "network.max_mode",
		"[network]\nprivate = ['lan']":                     "network.private",
		"[network.tenant_private]\nacme = ['10.0.0.0/33']": "network.tenant_private.acme",

		"[tls]\nlisten = '127.0.0.1:1'":            "needs tls.domain",
		"[tls]\ndomain = 'A b'":                    "domain name",
		"[tls]\ndomain = 'x.test:1'":               "domain name",
		"[tls]\ndomain = '127.0.0.1'":              "domain name",
		"[tls]\ndomain = 'x.test'\ncert = '/c'":    "belong together",
		"[tls]\ndomain = 'x.test'\nlisten = 'any'": "HOST:PORT",

		"[artifacts]\nlink_ttl = '240h'":  "artifacts.link_ttl 240h0m0s: a link holds for one second to 168 hours",
		"[artifacts]\nlink_ttl = '100ms'": "one second",

		"[sandbox]\npaused_lifetime = '-1s'": "sandbox.paused_lifetime cannot be negative",
		"[sandbox]\nstart_timeout = '-1s'":   "sandbox.start_timeout cannot be negative",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := config.Load(config.Source{File: file, Env: none}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
	if _, err := config.Load(config.Source{File: "/no/such", Env: none}); err == nil {
		t.Error("a file that was named and is not there is no error")
	}
}

func TestWhereTheTLSListenerIs(t *testing.T) {
	for _, c := range []struct{ listen, domain, tls, want string }{
		{"127.0.0.1:8080", "", "", ""},
		{"127.0.0.1:8080", "x.test", "", "127.0.0.1:7443"},
		{"127.0.0.1:0", "x.test", "", "127.0.0.1:0"},
		{"127.0.0.1:8080", "x.test", ":443", ":443"},
		{"127.0.0.1:8080", "x.test", "off", ""},
	} {
		cfg := config.Default()
		cfg.Listen, cfg.TLS.Domain, cfg.TLS.Listen = c.listen, c.domain, c.tls
		if got := cfg.TLSListen(); got != c.want || cfg.Validate() != nil {
			t.Errorf("%+v: %q, %v", c, got, cfg.Validate())
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]config.Size{"512MiB": 512 << 20, "1G": 1 << 30, "1.5g": 3 << 29, "100": 100, "2kb": 2000, "0": 0} {
		if got, err := config.ParseSize(text); err != nil || got != want {
			t.Errorf("%s: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "x", "-1", "1e30", "NaN"} {
		if got, err := config.ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}

func TestAServerWithoutKeysStaysOnThisMachine(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Config)
		bad    bool
	}{
		"on this machine":        {func(*config.Config) {}, false},
		"with TLS here":          {func(c *config.Config) { c.TLS.Domain = "cove.localhost" }, false},
		"everywhere":             {func(c *config.Config) { c.Listen = "0.0.0.0:8080" }, true},
		"everywhere, as it says": {func(c *config.Config) { c.Listen, c.Auth.Everywhere = "0.0.0.0:8080", true }, false},
		"with TLS for others":    {func(c *config.Config) { c.TLS.Domain, c.TLS.Listen = "cove.test", "0.0.0.0:7443" }, true},
		"behind a proxy":         {func(c *config.Config) { c.TLS.Domain, c.TLS.Listen = "cove.test", config.TLSOff }, true},
		"behind a proxy, as it says": {func(c *config.Config) {
			c.TLS.Domain, c.TLS.Listen, c.Auth.Everywhere = "cove.test", config.TLSOff, true
		}, false},
		"with keys it may be reached": {func(c *config.Config) { c.Listen, c.Auth.Anonymous = "0.0.0.0:8080", false }, false},
	} {
		cfg := config.Default()
		cfg.Auth.Anonymous = true
		c.change(&cfg)
		if err := cfg.Validate(); (err != nil) != c.bad {
			t.Errorf("%s: %v", name, err)
		}
	}
}

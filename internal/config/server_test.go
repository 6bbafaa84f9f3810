package config_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
)

func TestWhereServersReachEachOther(t *testing.T) {
	for name, c := range map[string]struct {
		listen string
		server config.Server
		want   string
		wrong  string // what the error says; empty: there is none
	}{
		"one server":               {"127.0.0.1:8080", config.Server{Replicas: 1}, "", ""},
		"several":                  {"0.0.0.0:8080", config.Server{Replicas: 2}, "0.0.0.0:7446", ""},
		"a port that is picked":    {"127.0.0.1:0", config.Server{Replicas: 2}, "127.0.0.1:0", ""},
		"an address of one's own":  {"127.0.0.1:8080", config.Server{Replicas: 2, PeerListen: "10.0.0.7:1"}, "10.0.0.7:1", ""},
		"no address":               {"127.0.0.1:8080", config.Server{Replicas: 2, PeerListen: "7446"}, "7446", "server.peer_listen"},
		"a URL":                    {"127.0.0.1:8080", config.Server{Replicas: 2, PeerURL: "https://10.0.0.7:7446"}, "127.0.0.1:7446", ""},
		"a URL without TLS":        {"127.0.0.1:8080", config.Server{Replicas: 2, PeerURL: "http://10.0.0.7:7446"}, "127.0.0.1:7446", "server.peer_url"},
		"a URL without a port":     {"127.0.0.1:8080", config.Server{Replicas: 2, PeerURL: "https://10.0.0.7"}, "127.0.0.1:7446", "server.peer_url"},
		"a URL with a path":        {"127.0.0.1:8080", config.Server{Replicas: 2, PeerURL: "https://10.0.0.7:1/x"}, "127.0.0.1:7446", "server.peer_url"},
		"a volume for all of one":  {"127.0.0.1:8080", config.Server{SharedVolume: true}, "", "server.shared_volume"},
		"a volume for all of them": {"127.0.0.1:8080", config.Server{Replicas: 2, SharedVolume: true}, "127.0.0.1:7446", ""},
	} {
		cfg := config.Default()
		cfg.Listen, cfg.Server, cfg.DataDir, cfg.Driver = c.listen, c.server, t.TempDir(), config.DriverInproc
		cfg.Database.URL = "postgres://cove@db.example/cove"
		if got := cfg.PeerListen(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if err := cfg.Validate(); (err != nil) != (c.wrong != "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPlainListen(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Config)
		want   string
	}{
		"without a domain":         {func(*config.Config) {}, "0.0.0.0:8080"},
		"with a domain":            {func(c *config.Config) { c.TLS.Domain = "cove.test" }, "127.0.0.1:8080"},
		"TLS is a proxy's":         {func(c *config.Config) { c.TLS.Domain, c.TLS.Listen = "cove.test", config.TLSOff }, "0.0.0.0:8080"},
		"with a domain, allowed":   {func(c *config.Config) { c.TLS.Domain, c.Server.InsecureHTTP = "cove.test", true }, "0.0.0.0:8080"},
		"with a domain and proxy":  {func(c *config.Config) { c.TLS.Domain, c.Server.TrustedProxies = "cove.test", []string{"10.0.0.1"} }, "0.0.0.0:8080"},
		"with a domain, localhost": {func(c *config.Config) { c.TLS.Domain, c.Listen = "cove.test", "localhost:8080" }, "localhost:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Listen = "0.0.0.0:8080"
			c.change(&cfg)
			if got := cfg.PlainListen(); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			if cfg.TLS.Domain != "" && cfg.TLS.Listen == "" && !strings.HasPrefix(cfg.Listen, "localhost") && cfg.TLSListen() != "0.0.0.0:7443" {
				t.Errorf("the TLS listener is on %s", cfg.TLSListen())
			}
		})
	}
}

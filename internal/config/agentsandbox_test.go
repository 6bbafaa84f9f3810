package config_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
)

func TestWhereTheKubernetesAPIIs(t *testing.T) {
	for _, c := range []struct {
		listen, own string
		ephemeral   bool
		want        string
	}{
		{"127.0.0.1:8080", "", false, "127.0.0.1:7445"},
		{"127.0.0.1:0", "", false, "127.0.0.1:0"},
		{"127.0.0.1:8080", "off", false, ""},
		{"127.0.0.1:8080", "0.0.0.0:443", false, "0.0.0.0:443"},
		{"127.0.0.1:0", "", true, ""}, // for one command
	} {
		cfg := config.Default()
		cfg.Listen, cfg.AgentSandbox.Listen, cfg.Ephemeral = c.listen, c.own, c.ephemeral
		if got := cfg.AgentSandboxListen(); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestAWrongKubernetesAPIIsRefused(t *testing.T) {
	for says, change := range map[string]func(*config.AgentSandbox){
		"HOST:PORT":                 func(a *config.AgentSandbox) { a.Listen = "everywhere" },
		"agent_sandbox.url":         func(a *config.AgentSandbox) { a.URL = "http://cove.example.com" },
		"belong together":           func(a *config.AgentSandbox) { a.Cert = "/c" },
		"which is not given":        func(a *config.AgentSandbox) { a.CA = "/c" },
		"neither a name":            func(a *config.AgentSandbox) { a.Names = []string{"a b"} },
		"everybody who reaches":     func(a *config.AgentSandbox) { a.Listen = "0.0.0.0:7445" },
		"auth.anonymous_everywhere": func(a *config.AgentSandbox) { a.Listen = "10.0.0.1:7445" },
	} {
		cfg := config.Default()
		cfg.Auth.Anonymous = true
		change(&cfg.AgentSandbox)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}

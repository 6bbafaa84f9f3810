package app_test

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
)

func TestPrint_PlainHTTPIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Config)
		told   bool
	}{
		"on loopback":        {func(*config.Config) {}, false},
		"on every address":   {func(c *config.Config) { c.Listen = "0.0.0.0:0" }, true},
		"with the setting":   {func(c *config.Config) { c.Listen, c.Server.InsecureHTTP = "0.0.0.0:0", true }, false},
		"with trusted proxy": {func(c *config.Config) { c.Listen, c.Server.TrustedProxies = "0.0.0.0:0", []string{"10.0.0.1"} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			cfg.ReadyFile = filepath.Join(t.TempDir(), "ready.json")
			c.change(&cfg)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var out bytes.Buffer
			done := make(chan error, 1)
			go func() { done <- app.Run(ctx, cfg, &out, io.Discard, false) }()
			await(t, cfg.ReadyFile, done)
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if strings.Contains(out.String(), "--insecure-http") != c.told {
				t.Errorf("it says:\n%s", out.String())
			}
		})
	}
}

// TestPrint_NamesLeadNowhere starts a server whose domain no resolver knows.
func TestPrint_NamesLeadNowhere(t *testing.T) {
	cfg := testConfig(t)
	cfg.ReadyFile = filepath.Join(t.TempDir(), "ready.json")
	cfg.TLS.Domain, cfg.TLS.Listen = "cove.invalid", "127.0.0.1:0"
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() { done <- app.Run(ctx, cfg, &out, io.Discard, false) }()
	await(t, cfg.ReadyFile, done)
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if want := "NOTE: no name below cove.invalid is known"; !strings.Contains(out.String(), want) {
		t.Errorf("no %q in:\n%s", want, out.String())
	}
}

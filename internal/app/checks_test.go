package app_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestS4_129_D17_ReadinessTellsItsPartsAndHealthDoesNotDependOnThem(t *testing.T) {
	cfg := testConfig(t)
	s := startE2B(t, cfg, nil)
	want := func(claim string, status int, has ...string) {
		t.Helper()
		resp, body := s.ask(t, "GET", s.URL+"/readyz", "", nil)
		for end := time.Now().Add(2 * time.Minute); resp.StatusCode != status && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			resp, body = s.ask(t, "GET", s.URL+"/readyz", "", nil) // an answer holds for a second
		}
		if resp.StatusCode != status {
			t.Errorf("%s: %d %s", claim, resp.StatusCode, body)
		}
		for _, part := range has {
			if !strings.Contains(body, part) {
				t.Errorf("%s: no %s in %s", claim, part, body)
			}
		}
		if strings.Contains(body, cfg.DataDir) {
			t.Errorf("%s: it tells where things are: %s", claim, body)
		}
	}
	want("all is well", 200, `"status":"ready"`, `"database":"ok"`, `"files":"ok"`)
	dir := filepath.Join(cfg.DataDir, "server")
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	want("without a place for files", 503, `"status":"unavailable"`, `"files":"failed"`, `"database":"ok"`, "not ready: files;")
	if resp, body := s.ask(t, "GET", s.URL+"/healthz", "", nil); resp.StatusCode != 200 || !strings.Contains(body, "ok") {
		t.Errorf("it lives all the same: %d %s", resp.StatusCode, body)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	want("with it again", 200)
}

package app

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestBallast_FileSystemThatRefuses stands for a file system without fallocate.
func TestBallast_FileSystemThatRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "server")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, ballastName)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, "in the way"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := keepBallast(dir, slog.New(slog.NewTextHandler(&out, nil)))
		time.Sleep(3 * ballastRest)
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(ballastRest)
		if info, err := os.Lstat(path); err != nil || info.Size() != ballastBytes {
			t.Errorf("the space is not taken when it can be: %v, %v", info, err)
		}
		if err := b.close(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out.String(), "no space is kept"); n != 1 {
			t.Errorf("%d lines in the log, want 1:\n%s", n, out.String())
		}
	})
}

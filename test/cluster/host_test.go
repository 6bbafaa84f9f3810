package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// scratch is a cluster in a directory of the test's, of which nothing runs.
func scratch(t *testing.T) *cluster {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	c, err := newCluster(filepath.Join(t.TempDir(), "cluster"), true, &bytes.Buffer{}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"pki", "log", "pid", "node"} {
		if err := os.MkdirAll(c.path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func TestAPartThatDoesNotStartTellsItsLog(t *testing.T) {
	c := scratch(t)
	err := c.start(t.Context(), part{
		name: "broken", limit: 10 * time.Second, args: []string{"sh", "-c", "echo no such flag; exit 3"},
		ready: func(context.Context) (bool, error) { return false, nil },
	})
	if err == nil || !strings.Contains(err.Error(), "it ended") || !strings.Contains(err.Error(), "no such flag") {
		t.Errorf("it says %v", err)
	}
}

func TestAPartThatIsNeverReadyIsToldSo(t *testing.T) {
	c := scratch(t)
	err := c.start(t.Context(), part{
		name: "slow", limit: 200 * time.Millisecond, args: []string{"sleep", "60"},
		ready: func(context.Context) (bool, error) { return false, errors.New("not yet") },
	})
	if err == nil || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("it says %v", err)
	}
	run := c.recorded("slow")
	if err := c.end(t.Context(), "slow", syscall.SIGTERM, 5*time.Second); err != nil || alive(run) {
		t.Errorf("it lives: %v", err)
	}
}

func TestAPartThatRefusesToEndIsMade(t *testing.T) {
	c := scratch(t)
	stubborn := part{
		name: "stubborn", limit: 10 * time.Second, args: []string{"sh", "-c", "trap '' TERM; echo there; while :; do sleep 60; done"},
		ready: func(context.Context) (bool, error) { return strings.Contains(c.tail("stubborn"), "there"), nil },
	}
	if err := c.start(t.Context(), stubborn); err != nil {
		t.Fatal(err)
	}
	run := c.recorded("stubborn")
	if err := c.end(t.Context(), "stubborn", syscall.SIGTERM, 100*time.Millisecond); err != nil || alive(run) {
		t.Errorf("it lives: %v", err)
	}
}

// A number that was given to another process meanwhile must not be what is ended.
func TestAProcessOfSomebodyElseIsLeftAlone(t *testing.T) {
	c := scratch(t)
	if err := c.start(t.Context(), part{name: "theirs", limit: time.Second, args: []string{"sleep", "60"}, ready: atOnce}); err != nil {
		t.Fatal(err)
	}
	theirs := c.recorded("theirs")
	t.Cleanup(func() { _ = syscall.Kill(theirs.pid, syscall.SIGKILL) })
	if err := c.write("pid/ours", []byte(strings.Replace(mustRead(t, c.path("pid/theirs")), theirs.since, "1", 1))); err != nil {
		t.Fatal(err)
	}
	if err := c.end(t.Context(), "ours", syscall.SIGKILL, time.Second); err != nil {
		t.Fatal(err)
	}
	if !alive(theirs) {
		t.Error("it was ended")
	}
}

func mustRead(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestTheKeysOfACluster(t *testing.T) {
	c := scratch(t)
	if err := c.makeKeys("192.0.2.7", "6443"); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(mustRead(t, c.path("pki/ca.crt")))) {
		t.Fatal("the authority has no certificate")
	}
	for file, name := range map[string]string{"apiserver": "192.0.2.7", "node": "n1", "admin": ""} {
		pair, err := tls.LoadX509KeyPair(c.path("pki", file+".crt"), c.path("pki", file+".key"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	var admin struct {
		Users []struct {
			User struct {
				Key []byte `json:"client-key-data"`
			} `json:"user"`
		} `json:"users"`
	}
	if err := json.Unmarshal([]byte(mustRead(t, c.path("pki/admin.kubeconfig"))), &admin); err != nil {
		t.Fatal(err)
	}
	if len(admin.Users) != 1 || string(admin.Users[0].User.Key) != mustRead(t, c.path("pki/admin.key")) {
		t.Error("the kubeconfig does not hold its key")
	}
	if info, err := os.Stat(c.path("pki/ca.key")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the authority's key: %v, %v", info.Mode(), err)
	}
}

func TestTheProgramsAreNamedByWhatTheyAreMadeFrom(t *testing.T) {
	dir := t.TempDir()
	name := func(a, b string) string {
		for file, text := range map[string]string{"a": a, "b": b} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		key, err := digest(dir, "a", "b")
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	seen := map[string]bool{name("1", "2"): true, name("1", "3"): true, name("12", ""): true, name("", "12"): true, name("1", "2"): true}
	if len(seen) != 4 {
		t.Errorf("four makings have the names %v", seen)
	}
}

func TestTheEndOfNothing(t *testing.T) {
	c := scratch(t)
	if err := os.RemoveAll(c.dir); err != nil {
		t.Fatal(err)
	}
	if err := c.down(t.Context()); err != nil {
		t.Error(err)
	}
}

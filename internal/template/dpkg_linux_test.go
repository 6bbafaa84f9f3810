package template_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// database makes the package database of a host, and a definition that copies it.
func database(t *testing.T) (dpkg, definitions string) {
	t.Helper()
	dpkg = filepath.Join(hostDir(t), "dpkg")
	for _, name := range []string{"status", "lock", "lock-frontend", "info/bash.list"} {
		put(t, filepath.Join(dpkg, name), "x", 0o644)
	}
	for _, dir := range []string{dpkg, dpkg + "/info", dpkg + "/updates"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dpkg, write(t, map[string]string{"x.toml": "name = 'x'\n[host]\ncopy = ['" + dpkg + "']"})
}

// holdLock locks a file as a process of its own would.
func holdLock(t *testing.T, name string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	return func() { f.Close() }
}

func TestDpkg_BuildWaitsForItsLock(t *testing.T) {
	needRoot(t)
	for _, lock := range []string{"lock", "lock-frontend"} {
		t.Run(lock, func(t *testing.T) {
			dpkg, dir := database(t)
			release := holdLock(t, filepath.Join(dpkg, lock))
			var told []template.Progress
			built, err := open(t, dir).Ensure(t.Context(), "x", func(p template.Progress) {
				if told = append(told, p); p.Step == template.StepWait {
					put(t, dpkg+"/info/new.list", "x", 0o644) // the package manager finishes
					release()
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(steps(told), template.StepWait) {
				t.Errorf("the build did not wait: %+v", told)
			}
			if _, err := os.Stat(built.Trees[0].Lower[0] + dpkg + "/info/new.list"); err != nil {
				t.Errorf("the copy was made before the package manager had finished: %v", err)
			}
		})
	}
	t.Run("for long", func(t *testing.T) {
		defer template.SetDpkgPatience(10 * time.Millisecond)()
		dpkg, dir := database(t)
		defer holdLock(t, dpkg+"/lock")()
		_, err := open(t, dir).Ensure(t.Context(), "x", nil)
		if !fault.Is(err, fault.Unavailable) || !errors.Is(err, template.ErrDpkgBusy) || !strings.Contains(err.Error(), "package manager") {
			t.Errorf("got %v", err)
		}
	})
}

func TestDpkg_InterruptedIsRefused(t *testing.T) {
	needRoot(t)
	dpkg, dir := database(t)
	put(t, dpkg+"/updates/0001", "Package: bash", 0o644)
	_, err := open(t, dir).Ensure(t.Context(), "x", nil)
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "dpkg --configure -a") {
		t.Errorf("got %v", err)
	}
	if err := os.Remove(dpkg + "/updates/0001"); err != nil {
		t.Fatal(err)
	}
	ensure(t, open(t, dir), "x")
}

package inproc_test

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/drivertest"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func subject(t *testing.T) drivertest.Subject {
	t.Helper()
	kernel, err := filepath.Abs("../../../kernel/kernel.py")
	if err != nil {
		t.Fatal(err)
	}
	python := template.Python{Executable: "python3"}
	if _, err := os.Stat("/usr/bin/python3"); err == nil {
		python.Executable = "/usr/bin/python3" // not a shim that is slow to start
	}
	if _, err := os.Stat(kernel); err != nil {
		kernel, python = "", template.Python{}
	}
	d, err := inproc.New(inproc.Config{Kernel: kernel})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return drivertest.Subject{Driver: d, Tenant: "t1", Template: &template.Template{Name: "base", Python: python}}
}

func TestDriver(t *testing.T) { drivertest.Run(t, subject) }

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestNothingIsLeftBehind(t *testing.T) {
	d := subject(t).Driver
	cycle := func() {
		req := sandbox.StartRequest{ID: "a", Template: &template.Template{Name: "base"}}
		if err := d.Start(context.Background(), req); err != nil {
			t.Fatal(err)
		}
		if err := d.Stop(context.Background(), "a", sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
	}
	cycle() // the runtime's own descriptors and goroutines exist from here on
	goroutines, fds := runtime.NumGoroutine(), descriptors(t)
	for range 20 {
		cycle()
	}
	deadline := time.Now().Add(2 * time.Minute)
	for runtime.NumGoroutine() > goroutines && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines became %d", goroutines, n)
	}
	if n := descriptors(t); n > fds {
		t.Errorf("%d descriptors became %d", fds, n)
	}
}

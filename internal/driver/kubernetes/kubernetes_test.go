package kubernetes_test

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/drivertest"
	"github.com/covehq/cove/internal/driver/kubernetes"
)

// skip says why in the name of a test, which is all that a summary shows.
func skip(t *testing.T, why string) {
	t.Helper()
	t.Run("skipped: "+why, func(t *testing.T) { t.Skip(why) })
	t.SkipNow()
}

func python(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"/usr/bin/python3", "/usr/local/bin/python3"} {
		if _, err := os.Stat(name); err == nil {
			return name
		}
	}
	skip(t, "no python3 here")
	return ""
}

func template(t *testing.T, pool int) kubernetes.Template {
	t.Helper()
	return kubernetes.Template{Image: "host", Pool: pool, UID: containerUID, Python: python(t), Preload: []string{"decimal"}}
}

// open makes a driver on a fake cluster.
func open(t *testing.T, a *api, owner string, templates map[string]kubernetes.Template) *kubernetes.Driver {
	t.Helper()
	return openFor(t, a, owner, templates, 0)
}

// quick makes one whose starts may take a tenth of a second.
func quick(t *testing.T, a *api, owner string, templates map[string]kubernetes.Template) *kubernetes.Driver {
	t.Helper()
	return openFor(t, a, owner, templates, 100*time.Millisecond)
}

func openFor(t *testing.T, a *api, owner string, templates map[string]kubernetes.Template, start time.Duration) *kubernetes.Driver {
	t.Helper()
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	d, err := kubernetes.New(t.Context(), kubernetes.Config{
		Namespace: "boxes", Image: "cove", Owner: owner, Templates: templates, Images: &kubernetes.Template{}, Policies: true, Servers: map[string]string{"app": "cove"}, Rest: a.config(), StartTimeout: start,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestDriver runs the contract on Pods that are real in everything but their cluster; cluster_test.go does it on a real one. It looks at the heap, so
// nothing runs beside it.
func TestDriver(t *testing.T) {
	a := newAPI(t)
	newKubelet(t, a)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": template(t, 4)})
	drivertest.Run(t, func(*testing.T) drivertest.Subject {
		return drivertest.Subject{Driver: d, Tenant: "t1", Template: d.Templates()[0], Image: anImage}
	})
}

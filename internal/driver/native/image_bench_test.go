package native_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// BenchmarkCreate compares creates of a cached image with those of the host template, both from a full pool.
func BenchmarkCreate(b *testing.B) {
	m := imageMaker(b)
	python := buildTemplate(b, "python")
	text, err := json.Marshal(map[string]any{"template": python})
	if err != nil {
		b.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(m.templates(), "built", "layers"), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.templates(), "built", "python.json"), text, 0o644); err != nil {
		b.Fatal(err)
	}
	image := m.image(b, nil, busybox(b).bytes(), newLayer(b).file("a", "1").bytes(), newLayer(b).file("b", "1").bytes())
	for _, c := range []struct {
		name string
		of   *template.Template
	}{{"host", python}, {"image", image}} {
		b.Run(c.name, func(b *testing.B) { m.benchCreate(b, c.of) })
	}
}

func (m *ownMaker) benchCreate(b *testing.B, of *template.Template) {
	if err := m.driver.Prepare(b.Context(), tenant, of); err != nil {
		b.Fatal(err)
	}
	m.awaitPools(b)
	for b.Loop() {
		id := fmt.Sprintf("be%d", world.next.Add(1))
		err := m.driver.Start(b.Context(), sandbox.StartRequest{
			ID: id, Tenant: tenant, Template: of, Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 256},
			Network: policy.Network{Mode: policy.Internet}, Deadline: time.Now().Add(time.Minute),
		})
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		if err := m.driver.Stop(b.Context(), id, sandbox.CauseKilled); err != nil {
			b.Fatal(err)
		}
		m.awaitPools(b)
		b.StartTimer()
	}
}

// awaitPools waits until creates find a shell ready.
func (m *ownMaker) awaitPools(b *testing.B) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		s, err := m.driver.Stats(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		if s.Lacking == 0 && s.Dying == 0 {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%+v", s)
		}
	}
}

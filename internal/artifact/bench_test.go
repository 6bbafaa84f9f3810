package artifact_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/artifact"
)

// BenchmarkCollectSmall keeps a thousand files of 4 KiB.
func BenchmarkCollectSmall(b *testing.B) { benchmarkCollect(b, 1000, 4<<10) }

// BenchmarkCollectLarge keeps one file of 64 MiB.
func BenchmarkCollectLarge(b *testing.B) { benchmarkCollect(b, 1, 64<<20) }

func benchmarkCollect(b *testing.B, files, size int) {
	cfg := defaults
	cfg.MaxFileSize = 1 << 30
	w := newWorld(b, cfg)
	content := make([]byte, size)
	b.SetBytes(int64(files) * int64(size))
	for b.Loop() {
		b.StopTimer()
		for i := range files {
			_, _ = rand.Read(content[:min(size, 64)])
			if err := os.WriteFile(filepath.Join(w.box.Dir, fmt.Sprint(i)), content, 0o644); err != nil {
				b.Fatal(err)
			}
		}
		b.StartTimer()
		list, err := w.Collect(b.Context(), w.agent, tenant, artifact.Origin{Session: "s1", Key: "chat", Sandbox: "sb1", Run: "run1"}, w.box)
		if err != nil || len(list) != files || list[0].ID == "" {
			b.Fatal(len(list), err)
		}
	}
}

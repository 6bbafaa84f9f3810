package template

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkCensus counts a tree as large as the layer of the template "python": 29,700 entries. It also
// tells the processor time, since the look is shared by all processors.
func BenchmarkCensus(b *testing.B) {
	const directories, files = 3700, 7
	root := b.TempDir()
	for i := range directories {
		dir := filepath.Join(root, fmt.Sprint("package", i%60), fmt.Sprint("part", i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			b.Fatal(err)
		}
		for k := range files {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("module_%d.cpython-313.pyc", k)), nil, 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportAllocs()
	begun := processorTime(b)
	for b.Loop() {
		if _, err := takeCensus(root); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(processorTime(b)-begun)/float64(b.N)/1e6, "cpu-ms/op")
}

// processorTime is what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

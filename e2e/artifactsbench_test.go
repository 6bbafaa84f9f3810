package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// ingestFigures compare keeping files with copying them and adding up their digests.
type ingestFigures struct {
	Files     int     `json:"files"`
	Bytes     int64   `json:"bytes"` // of all together
	IngestMS  float64 `json:"ingest_ms"`
	CopyMS    float64 `json:"cp_ms"`
	SumMS     float64 `json:"sha256sum_ms"`
	Ratio     float64 `json:"ratio"` // of the speeds: 1 is as fast as cp and sha256sum together
	MemoryMB  float64 `json:"server_memory_growth_mb"`
	Rounds    int     `json:"rounds"`
	LoadAfter string  `json:"load_after"`
}

// TestArtifactsBench keeps many small files and a large one, each beside cp and sha256sum of the same files at the same time of
// day: `make bench-artifacts` asks for it.
func TestArtifactsBench(t *testing.T) {
	out := os.Getenv("COVE_ARTIFACTS_BENCH")
	if out == "" {
		t.Skip("make bench-artifacts runs it")
	}
	s := newServer(t, "COVE_ARTIFACTS_MAX_FILE_SIZE=2GiB")
	d := s.dataSession(t, "ingest", client.SessionRequest{Storage: "disk", Limits: &client.Limits{MemoryBytes: 1 << 30, DiskBytes: 5 << 30}})
	d.prints("print(1)")
	figures := map[string]ingestFigures{
		"1000 files of 4 KiB": s.ingest(t, d, 1000, 4<<10, 20),
		"one file of 1 GiB":   s.ingest(t, d, 1, 1<<30, 2),
	}
	text, err := json.MarshalIndent(figures, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", text)
	if err := os.WriteFile(out, append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, f := range figures {
		if f.Ratio < 0.5 || f.MemoryMB > 32 {
			t.Errorf("%s: %.2f of cp and sha256sum, %.0f MB of memory", name, f.Ratio, f.MemoryMB)
		}
	}
}

// ingest measures the best of some rounds of each side, which take turns. Nothing is removed between them: for half a minute
// ext4 looks at every inode that was freed before it takes another.
func (s *server) ingest(t *testing.T, d *dataSession, files int, size int64, rounds int) ingestFigures {
	t.Helper()
	f := ingestFigures{Files: files, Bytes: int64(files) * size, Rounds: rounds}
	best := func(of *float64, took time.Duration) {
		if ms := took.Seconds() * 1000; *of == 0 || ms < *of {
			*of = ms
		}
	}
	source, err := os.MkdirTemp(s.dir, "source") // the file system of the server's own blobs
	if err != nil {
		t.Fatal(err)
	}
	for round := range rounds {
		// The same random bytes on both sides; new ones for each round, so that nothing is there already.
		code := fmt.Sprintf(`
import os, random
os.makedirs('/session/made', exist_ok=True)
r = random.Random(%d)
for i in range(%d):
    with open(f'/session/made/{i:04}', 'wb') as f:
        for at in range(0, %d, 1 << 20): f.write(r.randbytes(min(1 << 20, %d - at)))
os.sync()`, round, files, size, size)
		d.prints(code)
		host := exec.CommandContext(t.Context(), "python3", "-c", strings.ReplaceAll(code, "/session/made", filepath.Join(source, "made")))
		if text, err := host.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		before := s.peak(t, true)
		begun := time.Now()
		var answer client.SessionOutput
		// They come all at once, by one rename: what the cell takes is not what is measured.
		d.call("POST", "/run", client.SessionRunRequest{Code: fmt.Sprintf("os.rename('/session/made', '/session/artifacts/%d of %d')", round, files)}, &answer)
		best(&f.IngestMS, time.Since(begun))
		f.MemoryMB = max(f.MemoryMB, float64(s.peak(t, false)-before)/(1<<20))
		if n := len(answer.Artifacts); n != files || answer.Artifacts[0].ID == "" {
			t.Fatalf("%d artifacts: %+v", n, answer.Artifacts[0])
		}
		sh(t, "sync") // or cp would wait for what the server has just kept
		begun = time.Now()
		sh(t, fmt.Sprintf("cp -r %s/made %s/copy%d", source, source, round))
		best(&f.CopyMS, time.Since(begun))
		begun = time.Now()
		sh(t, fmt.Sprintf("sha256sum %s/copy%d/* >/dev/null", source, round))
		best(&f.SumMS, time.Since(begun))
	}
	f.Ratio = (f.CopyMS + f.SumMS) / f.IngestMS
	load, _ := os.ReadFile("/proc/loadavg")
	f.LoadAfter = strings.Fields(string(load) + " ?")[0]
	return f
}

func sh(t *testing.T, line string) {
	t.Helper()
	if text, err := exec.CommandContext(t.Context(), "sh", "-c", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", line, err, text)
	}
}

package e2e_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
)

// datasetFigures is what one run of the benchmark says. Sizes are in MB of a million bytes.
type datasetFigures struct {
	Host struct {
		Kernel   string  `json:"kernel"`
		CPUs     int     `json:"cpus"`
		MemoryMB int64   `json:"memory_mb"`
		Load     float64 `json:"load_before"`
	} `json:"host"`
	Sessions      int     `json:"sessions"`
	DatasetMB     int64   `json:"dataset_mb"`
	StageSeconds  float64 `json:"stage_seconds"`
	ByDigestMS    float64 `json:"stage_by_digest_ms"` // mean of the other sessions, which send nothing
	ReadSeconds   float64 `json:"read_seconds"`       // all sessions at once, each the whole dataset
	ReadMBPerS    float64 `json:"read_mb_per_second"` // of all together
	Inodes        int     `json:"inodes"`             // that the sessions see
	StoredMB      int64   `json:"stored_mb"`
	ResidentPages float64 `json:"resident"` // part of the file that mincore finds in memory
	CachedMB      int64   `json:"cached_change_mb"`
}

// TestDatasetsBench shows that many sessions over one dataset have it in memory once: `make bench-datasets` asks for it.
func TestDatasetsBench(t *testing.T) {
	out := os.Getenv("COVE_DATASETS_BENCH")
	if out == "" {
		t.Skip("make bench-datasets runs it")
	}
	const sessions, size = 22, 1 << 30
	const mb = size / 1_000_000
	s := newServer(t)
	f := datasetFigures{Sessions: sessions, DatasetMB: mb}
	f.describe(t)
	all := make([]*dataSession, sessions)
	for i := range all {
		all[i] = s.dataSession(t, fmt.Sprintf("bench-%d", i), api("tmpfs"))
	}
	cached := meminfo(t, "Cached")
	begun := time.Now()
	first := all[0].stage("shared.bin", "", &noise{left: size})
	f.StageSeconds = time.Since(begun).Seconds()
	begun = time.Now()
	for _, d := range all[1:] {
		if _, err := s.MarkDataset(t.Context(), d.key, "shared.bin", client.DatasetRequest{Status: "loaded", SHA256: first.SHA256}); err != nil {
			t.Fatal(err)
		}
	}
	f.ByDigestMS = time.Since(begun).Seconds() * 1000 / (sessions - 1)
	f.readAll(t, all)
	f.CachedMB = (meminfo(t, "Cached") - cached) / 1e6
	blob := filepath.Join(s.dir, "server/datasets/blobs/t-default", first.SHA256[:2], first.SHA256)
	f.StoredMB, f.ResidentPages = stored(t, filepath.Join(s.dir, "server/datasets")), resident(t, blob)
	text, err := json.MarshalIndent(f, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", text)
	if err := os.WriteFile(out, append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	if f.Inodes != 1 || f.StoredMB > mb+1 || f.ResidentPages < 0.99 || f.CachedMB > 2*mb {
		t.Errorf("%d sessions have the dataset more than once", sessions)
	}
}

// readAll has every session read the dataset whole, all at the same time.
func (f *datasetFigures) readAll(t *testing.T, all []*dataSession) {
	t.Helper()
	const code = `
import os
b = bytearray(1 << 20); n = 0
with open('/session/data/shared.bin', 'rb', buffering=0) as f:
    while k := f.readinto(b): n += k
    st = os.fstat(f.fileno())
print(n, st.st_dev, st.st_ino)`
	begun := time.Now()
	seen := make([]string, len(all))
	var each sync.WaitGroup
	for i, d := range all {
		each.Go(func() { seen[i] = d.run(code).Stdout })
	}
	each.Wait()
	f.ReadSeconds = time.Since(begun).Seconds()
	f.ReadMBPerS = float64(f.DatasetMB) * float64(f.Sessions) / f.ReadSeconds
	inodes := map[string]bool{}
	for i, line := range seen {
		size, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		if size != fmt.Sprint(1<<30) {
			t.Errorf("session %d read %q", i, line)
		}
		inodes[file] = true
	}
	f.Inodes = len(inodes)
}

func (f *datasetFigures) describe(t *testing.T) {
	t.Helper()
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	f.Host.Kernel, f.Host.CPUs, f.Host.MemoryMB = unix.ByteSliceToString(name.Release[:]), runtime.NumCPU(), meminfo(t, "MemTotal")/1e6
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	minute, _, _ := strings.Cut(string(text), " ")
	f.Host.Load, _ = strconv.ParseFloat(minute, 64)
}

// meminfo is a line of /proc/meminfo in bytes.
func meminfo(t *testing.T, name string) int64 {
	t.Helper()
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var kb int64
		if n, _ := fmt.Sscanf(lines.Text(), name+": %d kB", &kb); n == 1 {
			return kb << 10
		}
	}
	t.Fatalf("no %s in /proc/meminfo", name)
	return 0
}

// stored is what the files below a directory take on disk, each inode once.
func stored(t *testing.T, dir string) (mb int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		var st unix.Stat_t
		if err == nil && info.Mode().IsRegular() {
			err = unix.Lstat(path, &st)
		}
		if err == nil && st.Ino != 0 && !seen[st.Ino] {
			seen[st.Ino] = true
			mb += st.Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return mb / 1e6
}

// resident is which part of a file is in the page cache.
func resident(t *testing.T, path string) float64 {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	pages := make([]byte, (len(mapped)+os.Getpagesize()-1)/os.Getpagesize())
	if err := mincore(mapped, pages); err != nil {
		t.Fatal(err)
	}
	in := 0
	for _, p := range pages {
		in += int(p & 1)
	}
	return float64(in) / float64(len(pages))
}

// noise is bytes that no file system makes smaller.
type noise struct {
	left int
	rand *rand.ChaCha8
}

func (n *noise) Read(p []byte) (int, error) {
	if n.rand == nil {
		n.rand = rand.NewChaCha8([32]byte{1})
	}
	if n.left == 0 {
		return 0, io.EOF
	}
	k := min(len(p), n.left)
	n.left -= k
	return n.rand.Read(p[:k])
}

func mincore(mapped, pages []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mapped[0])), uintptr(len(mapped)), uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		return errno
	}
	return nil
}

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestThePackedTreeHasWhatProgramsNeedAndNoMore(t *testing.T) {
	root := t.TempDir()
	for _, file := range []string{"etc/passwd", "home/user/x", "usr/bin/python3", "usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib/jvm/java", "usr/share/doc/x",
		"usr/local/go/bin/go", "usr/lib64/ld.so", "usr/libexec/x", "usr/lib/python3.11/os.py"} {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(file), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("usr/bin", filepath.Join(root, "bin")); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := pack(&archive, root); err != nil {
		t.Fatal(err)
	}
	var files []string
	for r := tar.NewReader(&archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		if content, err := io.ReadAll(r); err != nil || h.Typeflag == tar.TypeReg && string(content) != h.Name {
			t.Errorf("%s: %q, %v", h.Name, content, err)
		}
		files = append(files, h.Name)
	}
	want := []string{"bin", "etc/passwd", "home/user/x", "usr/bin/python3", "usr/lib/python3.11/os.py", "usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib64/ld.so"}
	if !slices.Equal(files, want) {
		t.Errorf("packed\n%q, want\n%q", files, want)
	}
}

func TestBusyIsTheShareOfTheTimeBetween(t *testing.T) {
	before := cpuTime{idle: 100, total: 200}
	for _, c := range []struct {
		now  cpuTime
		want float64
	}{
		{cpuTime{idle: 200, total: 300}, 0},
		{cpuTime{idle: 100, total: 300}, 1},
		{cpuTime{idle: 175, total: 300}, 0.25},
		{before, 1}, // nothing is known: not quiet
	} {
		if got := c.now.busySince(before); got != c.want {
			t.Errorf("%+v: %v, want %v", c.now, got, c.want)
		}
	}
}

func TestALevelIsNeverAboveWhatWasAskedFor(t *testing.T) {
	for live, want := range map[int][]int{1000: {10, 100, 300, 1000}, 20: {10, 20}, 300: {10, 100, 300}, 5: {5}, 2000: {10, 100, 300, 1000, 2000}} {
		w := &world{options: options{full: true, live: live}}
		if got := w.stops(); !slices.Equal(got, want) {
			t.Errorf("%d: %v, want %v", live, got, want)
		}
	}
}

func TestChurnCountsFailuresAndTheWorstSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		rows, err := churn(t.Context(), "x", 1, 3*time.Second, func(context.Context) error {
			n++
			switch {
			case n == 2:
				return errors.New("no")
			case n > 20:
				time.Sleep(500 * time.Millisecond)
			default:
				time.Sleep(50 * time.Millisecond)
			}
			return nil
		})
		// 19 that succeed in the first 950 ms, then two a second.
		if err == nil || rows[0].N != n || rows[0].OK != n-1 || rows[0].Unit != "/s" {
			t.Errorf("%d rounds: %+v, %v", n, rows, err)
		}
		if rows[1].Value != 2 {
			t.Errorf("the worst second had %v, want 2", rows[1].Value)
		}
	})
}

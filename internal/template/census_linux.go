package template

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// takeCensus counts what is below dir, several directories at a time.
func takeCensus(dir string) (census, error) {
	c := counter{root: dir, workers: make(chan struct{}, runtime.NumCPU()), sums: map[string]string{}}
	err := c.count(dir)
	c.running.Wait()
	if err := errors.Join(append(c.failed, err)...); err != nil {
		return census{}, err
	}
	c.total.Names = digestOf(c.sums)
	return c.total, nil
}

type counter struct {
	root    string
	workers chan struct{} // bounds the goroutines
	running sync.WaitGroup

	mu     sync.Mutex
	total  census
	sums   map[string]string // by directory
	failed []error
}

func (c *counter) count(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	entries, err := f.ReadDir(-1)
	if err != nil {
		return err
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	var text []byte
	var bytes int64
	for _, e := range entries {
		text = append(append(text, e.Name()...), 0)
		text = strconv.AppendUint(text, uint64(e.Type()), 8)
		if e.Type().IsRegular() {
			var st unix.Stat_t
			if err := unix.Fstatat(int(f.Fd()), e.Name(), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return &fs.PathError{Op: "stat", Path: filepath.Join(dir, e.Name()), Err: err}
			}
			bytes += st.Size
			text = strconv.AppendInt(append(text, ' '), st.Size, 10)
		}
		text = append(text, '\n')
	}
	rel, err := filepath.Rel(c.root, dir)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	c.mu.Lock()
	c.total.Entries += len(entries)
	c.total.Bytes += bytes
	c.sums[rel] = hex.EncodeToString(sum[:])
	c.mu.Unlock()
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := c.below(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// below counts a directory in a goroutine of its own, if one is free.
func (c *counter) below(dir string) error {
	select {
	case c.workers <- struct{}{}:
	default:
		return c.count(dir)
	}
	c.running.Go(func() {
		defer func() { <-c.workers }()
		if err := c.count(dir); err != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.failed = append(c.failed, err)
		}
	})
	return nil
}

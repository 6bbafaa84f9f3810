package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/covehq/cove/client"
)

const (
	fileBytes  = 100e6
	fileRounds = 3
)

// content is the file that is moved: a block of noise again and again, so that it needs no memory of its own.
type content struct {
	block []byte
	sum   [sha256.Size]byte
}

func newContent() *content {
	c := &content{block: make([]byte, 1e6)}
	noise := rand.NewChaCha8([32]byte{1})
	_, _ = noise.Read(c.block) // never fails
	h := sha256.New()
	_, _ = io.Copy(h, c.reader()) // nor does this
	h.Sum(c.sum[:0])
	return c
}

func (c *content) reader() io.Reader {
	parts := make([]io.Reader, int(fileBytes)/len(c.block))
	for i := range parts {
		parts[i] = bytes.NewReader(c.block)
	}
	// Without the bare struct a copy would hand over a block at a time, which no real file does.
	return struct{ io.Reader }{io.MultiReader(parts...)}
}

// verify reads to the end and compares.
func (c *content) verify(r io.Reader) error {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return err
	}
	if !bytes.Equal(h.Sum(nil), c.sum[:]) {
		return fmt.Errorf("%d bytes came back with another SHA-256", n)
	}
	return nil
}

// measureFiles moves 100 MB in and out, in turns with a plain net/http server that keeps it in a file on the same disk.
// Both sides of the comparison verify the SHA-256 of what comes back.
func measureFiles(ctx context.Context, w *world) (rows []Row, err error) {
	base, err := startBaseline(w.dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, base.close()) }()
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sb.Kill(ctx)) }()
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	c := newContent()
	names := []string{"cove-put", "loopback-put", "cove-get", "loopback-get"}
	moves := []func() error{
		func() error { return write(ctx, sb, c) },
		func() error { return base.put(ctx, c) },
		func() error { return read(ctx, sb, c) },
		func() error { return base.get(ctx, c) },
	}
	growth := watchGrowth(w.server.Process.Pid)
	taken := make([]series, len(moves))
	for range fileRounds {
		for i, move := range moves {
			begun := time.Now()
			err := move()
			taken[i].add(time.Since(begun), err)
		}
	}
	for i, name := range names {
		row := taken[i].row("files-100mb", name)
		if row.OK > 0 {
			row.Value = round(fileBytes / 1e6 / percentile(taken[i].took, 50).Seconds())
		}
		row.Unit = "MB/s"
		rows = append(rows, row)
		err = errors.Join(err, taken[i].err())
	}
	grown := Row{Scenario: "files-100mb", Subject: "cove-growth", N: 1, OK: 1, Value: round(megabytes(growth())), Unit: "MB"}
	return append(rows, ratio(rows[0], rows[1]), ratio(rows[2], rows[3]), grown), err
}

// watchGrowth tells later by how much a process has grown at its largest.
func watchGrowth(pid int) func() int64 {
	// 5 sets the peak to what is used now; where that is refused the peak may be an older one, which only looks worse.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
	before := memory(pid, "status", "VmRSS")
	return func() int64 { return max(0, memory(pid, "status", "VmHWM")-before) } // the kernel counts roughly
}

const remoteFile = "bench/file"

func write(ctx context.Context, sb *client.Sandbox, c *content) error {
	e, err := sb.Files().Write(ctx, remoteFile, c.reader(), client.WriteOptions{})
	if err == nil && e.Size != fileBytes {
		err = fmt.Errorf("the file has %d bytes", e.Size)
	}
	return err
}

func read(ctx context.Context, sb *client.Sandbox, c *content) error {
	r, err := sb.Files().Open(ctx, remoteFile)
	if err != nil {
		return err
	}
	defer r.Close()
	return c.verify(r)
}

// baseline is the plain server, in a process of its own like the one it is compared with.
type baseline struct {
	url  string
	file string
	cmd  *exec.Cmd
	quit io.Closer
}

// baselineCommand makes this program the plain server.
const baselineCommand = "baseline"

func startBaseline(dir string) (*baseline, error) {
	file := filepath.Join(dir, "baseline")
	cmd := exec.Command("/proc/self/exe", baselineCommand, file)
	cmd.Stderr = os.Stderr
	quit, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b := &baseline{file: file, cmd: cmd, quit: quit}
	if _, err := fmt.Fscanln(out, &b.url); err != nil {
		return nil, errors.Join(fmt.Errorf("start the server to compare with: %w", err), b.close())
	}
	return b, nil
}

func (b *baseline) close() error {
	err := errors.Join(b.quit.Close(), b.cmd.Wait())
	os.Remove(b.file) // what is not on the disk by now need not get there
	return err
}

func (b *baseline) put(ctx context.Context, c *content) error {
	return b.do(ctx, http.MethodPut, c.reader(), func(r io.Reader) error { _, err := io.Copy(io.Discard, r); return err })
}

func (b *baseline) get(ctx context.Context, c *content) error {
	return b.do(ctx, http.MethodGet, nil, c.verify)
}

func (b *baseline) do(ctx context.Context, method string, body io.Reader, hear func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, method, b.url, body)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the server to compare with answered %s", resp.Status)
	}
	return hear(resp.Body)
}

// serveBaseline keeps what is put in a file and gives it back, until its stdin ends.
func serveBaseline(file string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "http://%s/\n", l.Addr())
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			http.ServeFile(w, r, file)
			return
		}
		if err := store(file, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		server.Close()
	}()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// store replaces the file when all of it is there, as a sandbox's files are.
func store(file string, content io.Reader) error {
	f, err := os.Create(file + ".new")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

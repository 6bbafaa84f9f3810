package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/template"
)

// world is a server of our own with everything that belongs to it.
type world struct {
	options  options
	dir      string
	server   *exec.Cmd
	client   *client.Client
	driver   *native.Driver // speaks to the server's maker, beside the server
	template *template.Template
	peers    *peers // nil: nobody else takes part
	pooled   int    // shells that wait when nothing happens
	next     atomic.Int64
}

// tenant owns the server's first key, and templateName is what it starts sandboxes from when not told otherwise.
const (
	tenant       = "default"
	templateName = "python"
)

const startTimeout = 2 * time.Minute

func open(ctx context.Context, o options) (_ *world, err error) {
	w := &world{options: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.dir, err = os.MkdirTemp("", "cove-bench-"); err != nil {
		return nil, err
	}
	if err := w.findTemplate(ctx); err != nil {
		return nil, fmt.Errorf("build template: %w", err)
	}
	if err := w.startServer(ctx); err != nil {
		return nil, err
	}
	w.driver, err = native.Open(ctx, native.Config{DataDir: w.data(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	if err := w.driver.Prepare(ctx, tenant, w.template); err != nil {
		return nil, err
	}
	return w, w.awaitPool(ctx)
}

func (w *world) data() string { return filepath.Join(w.dir, "data") }

// findTemplate uses the templates that the tests build once per machine, and builds what is missing: a minute, and no
// part of any measurement.
func (w *world) findTemplate(ctx context.Context) error {
	cache := os.Getenv("COVE_TEST_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return err
		}
		cache = filepath.Join(dir, "cove-test")
	}
	built := filepath.Join(cache, "templates")
	if err := os.MkdirAll(built, 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(w.data(), 0o700); err != nil {
		return err
	}
	link := filepath.Join(w.data(), "templates")
	if err := os.Symlink(built, link); err != nil {
		return err
	}
	// First by its own name, so that what is written down about it outlives the link.
	for _, dir := range []string{built, link} {
		store, err := template.Open(template.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		if w.template, err = store.Ensure(ctx, templateName, nil); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) startServer(ctx context.Context, flags ...string) error {
	ready := filepath.Join(w.dir, "ready.json")
	log, err := os.Create(filepath.Join(w.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	args := append([]string{"serve", "--listen", "127.0.0.1:0", "--data-dir", w.data(), "--ready-file", ready, "--log-level", "warn"}, flags...)
	w.server = exec.Command(w.options.cove, args...)
	w.server.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + w.dir}
	w.server.Stdout, w.server.Stderr = log, log
	w.server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt is for us: we stop it in order
	if err := w.server.Start(); err != nil {
		w.server = nil
		return err
	}
	var address struct {
		URL    string `json:"url"`
		APIKey string `json:"api_key"`
	}
	err = poll(ctx, startTimeout, 20*time.Millisecond, func() (bool, error) {
		var status syscall.WaitStatus
		if pid, _ := syscall.Wait4(w.server.Process.Pid, &status, syscall.WNOHANG, nil); pid > 0 {
			w.server = nil
			return false, fmt.Errorf("the server ended with status %d", status.ExitStatus())
		}
		text, err := os.ReadFile(ready)
		if err != nil {
			return false, nil // not there yet
		}
		return true, json.Unmarshal(text, &address)
	})
	if err != nil {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("start server: %w\n%s", err, said)
	}
	w.client, err = client.New(address.URL, address.APIKey)
	return err
}

// awaitPool waits until the pool has stopped growing and remembers its size.
func (w *world) awaitPool(ctx context.Context) error {
	since := time.Now()
	return poll(ctx, startTimeout, 10*time.Millisecond, func() (bool, error) {
		s, err := w.driver.Stats(ctx)
		if err != nil {
			return false, err
		}
		if s.Pooled != w.pooled {
			w.pooled, since = s.Pooled, time.Now()
		}
		return w.pooled > 0 && time.Since(since) > 500*time.Millisecond, nil
	})
}

// pause is how long the machine is left alone before a sample, so that none pays for the one before it.
const pause = 10 * time.Millisecond

// settle waits until the pool is as full as at first and nothing is being cleared away.
func (w *world) settle(ctx context.Context) error {
	err := poll(ctx, time.Minute, 2*time.Millisecond, func() (bool, error) {
		s, err := w.driver.Stats(ctx)
		return err == nil && s.Pooled >= w.pooled && s.Lacking == 0 && s.Dying == 0, err
	})
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	return err
}

// close ends what was started, in the reverse order, and waits for it.
func (w *world) close() error {
	// The caller's context may be what told us to stop.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	errs := []error{w.peers.close()}
	if w.client != nil {
		w.client.Close()
	}
	if w.server != nil {
		errs = append(errs, w.stopServer())
	}
	errs = append(errs, w.stopMaker(ctx))
	if w.dir != "" {
		w.tellErrors(os.Stderr)
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// tellErrors shows what the server logged as its own failures: a caller hears no more than that there was one.
func (w *world) tellErrors(to io.Writer) {
	said, _ := os.ReadFile(filepath.Join(w.dir, "log")) // none: it was never started
	for line := range strings.Lines(string(said)) {
		if strings.Contains(line, "level=ERROR") {
			fmt.Fprint(to, "server: ", line)
		}
	}
}

func (w *world) stopServer() error {
	err := w.server.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(15*time.Second, func() { _ = w.server.Process.Kill() }) // Wait tells
	defer late.Stop()
	return errors.Join(err, w.server.Wait())
}

// stopMaker ends every sandbox. The maker holds a lock for as long as it lives.
func (w *world) stopMaker(ctx context.Context) error {
	lock, err := os.Open(filepath.Join(w.data(), "maker", "lock"))
	if errors.Is(err, os.ErrNotExist) {
		return nil // there never was one
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if w.driver == nil {
		if w.driver, err = native.Open(ctx, native.Config{DataDir: w.data(), Log: slog.New(slog.DiscardHandler)}); err != nil {
			return fmt.Errorf("stop maker: %w", err)
		}
	}
	if err := w.driver.Shutdown(ctx); err != nil {
		return fmt.Errorf("stop maker: %w", err)
	}
	w.driver.Close()
	return poll(ctx, time.Minute, 20*time.Millisecond, func() (bool, error) {
		return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil, nil
	})
}

// errLate is a wait that was given up.
var errLate = errors.New("waited in vain")

// poll asks until the answer is yes: for things that tell nobody when they happen.
func poll(ctx context.Context, timeout, every time.Duration, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errLate)
	defer cancel()
	for {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		select {
		case <-time.After(every):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

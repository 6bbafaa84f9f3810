package maker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/covehq/cove/internal/driver/native/unpack"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Bounds of unpacking. What a layer may hold at most when nobody says less, and what the process that reads it may use: most
// of its memory is pages of files on their way to disk.
const (
	maxUnpacks    = 4
	maxLayerBytes = 64 << 30
	maxLayerFiles = 2 << 20
	unpackMemory  = 1 << 30
	unpackThreads = 64
)

// unpackProgram is this program's command that reads layers.
var unpackProgram = []string{"/proc/self/exe", "unpack"}

// converseUnpack answers a request to unpack a layer. A caller who leaves meanwhile ends it, so it has a connection of its own.
func (m *Maker) converseUnpack(ctx context.Context, c *net.UnixConn, r wire.Request, files []*os.File) {
	defer wire.CloseAll(files)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the connection, which carries nothing else
		_, _ = c.Read(make([]byte, 1))
		cancel()
	}()
	var response wire.Response
	if r.Layer == nil || len(files) != 1 {
		response = wire.Failed(fault.New(fault.Invalid, "unpack without a request or a file"))
	} else if l, err := m.guardUnpack(ctx, *r.Layer, files[0]); err != nil {
		response = wire.Failed(err)
	} else {
		response.Layers = []sandbox.Layer{l}
	}
	_ = wire.Send(c, response) // what is unpacked stays, whoever hears of it
}

// guardUnpack is Unpack, whose defects must not end every sandbox on this host.
func (m *Maker) guardUnpack(ctx context.Context, r sandbox.LayerRequest, blob *os.File) (l sandbox.Layer, err error) {
	defer func() {
		if what := recover(); what != nil {
			m.log.Error("unpack panicked", "panic", what, "stack", string(debug.Stack()))
			err = fault.New(fault.Internal, "the maker failed at unpack")
		}
	}()
	return m.Unpack(ctx, r, blob)
}

// Unpack makes a layer of a file, unless it is there. Of several callers of one layer the first does it.
func (m *Maker) Unpack(ctx context.Context, r sandbox.LayerRequest, blob *os.File) (sandbox.Layer, error) {
	if _, err := m.templates.LayerDir(r.DiffID); err != nil {
		return sandbox.Layer{}, err
	}
	if r.MaxBytes < 0 || r.MaxFiles < 0 {
		return sandbox.Layer{}, fault.New(fault.Invalid, "a limit cannot be negative")
	}
	done, err := m.images.take(ctx, r.DiffID)
	if err != nil {
		return sandbox.Layer{}, err
	}
	defer done()
	if l, ok, err := m.layer(r.DiffID, r.For); err != nil || ok {
		return l, err
	}
	select {
	case m.images.working <- struct{}{}:
		defer func() { <-m.images.working }()
	case <-ctx.Done():
		return sandbox.Layer{}, context.Cause(ctx)
	}
	return m.unpackNew(ctx, r, blob)
}

// take waits for one's turn at a layer.
func (s *layerStore) take(ctx context.Context, id string) (done func(), err error) {
	s.mu.Lock()
	t := s.turns[id]
	if t == nil {
		t = &turn{held: make(chan struct{}, 1)}
		s.turns[id] = t
	}
	t.waiting++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if t.waiting--; t.waiting == 0 {
			delete(s.turns, id)
		}
	}
	select {
	case t.held <- struct{}{}:
		return func() { <-t.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}

// unpackNew unpacks beside the layers and puts what came out among them.
func (m *Maker) unpackNew(ctx context.Context, r sandbox.LayerRequest, blob *os.File) (_ sandbox.Layer, err error) {
	dir, err := m.templates.LayerDir(r.DiffID)
	if err != nil {
		return sandbox.Layer{}, err
	}
	tmp, err := os.MkdirTemp(m.templates.ImagesDir(), template.HalfUnpacked)
	if err != nil {
		return sandbox.Layer{}, spaceless(err)
	}
	defer func() {
		if err := removeTree(tmp); err != nil {
			m.log.Error("remove what was unpacked", "error", fmt.Sprintf("%.300s", err.Error()))
		}
	}()
	result, err := m.unpackInto(ctx, filepath.Join(tmp, template.LayerTree), r, blob)
	if err != nil {
		return sandbox.Layer{}, err
	}
	// One without a description, which is all that can be there, was not put on disk by whoever made it.
	if err := removeTree(dir); err != nil {
		return sandbox.Layer{}, err
	}
	l := sandbox.Layer{DiffID: r.DiffID, Bytes: result.Bytes, Files: result.Files}
	s := &m.images
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Rename(tmp, dir); err != nil {
		return sandbox.Layer{}, fmt.Errorf("keep layer: %w", err)
	}
	s.fresh[r.DiffID], s.claims[claim{filepath.Base(dir), r.For}] = l, time.Now()
	m.log.Info("layer unpacked", "layer", r.DiffID, "bytes", l.Bytes, "files", l.Files, "skipped", result.Skipped, "nobodys", result.Nobodys)
	m.wg.Go(func() { // nobody waits for it: who adds an image does so again
		if err := m.settleLayers(); err != nil {
			m.log.Warn("put layers on disk", "error", err)
		}
	})
	return l, nil
}

// unpackInto has a process of its own unpack into a new directory.
func (m *Maker) unpackInto(ctx context.Context, dir string, r sandbox.LayerRequest, blob *os.File) (unpack.Result, error) {
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Chmod(dir, 0o755)); err != nil {
		return unpack.Result{}, spaceless(err)
	}
	tree, err := cloneTree(dir)
	if err != nil {
		return unpack.Result{}, err
	}
	defer tree.Close()
	at, err := m.takePlace(template.Limits{CPUs: float64(max(1, runtime.NumCPU()/2)), MemoryBytes: unpackMemory, Pids: unpackThreads})
	if err != nil {
		return unpack.Result{}, err
	}
	defer m.wg.Go(func() { m.givePlace(at) }) // the kernel takes its time to let go of a cgroup
	keep, err := m.space.keepFree(dir)
	if err != nil {
		return unpack.Result{}, fmt.Errorf("look at the disk's free space: %w", err)
	}
	jail := unpack.Jail{Program: unpackProgram, Blob: blob, Tree: tree, Cgroup: at.group.Joiners(), Base: uidBase(at.slot)}
	return unpack.Run(ctx, jail, unpack.Request{
		DiffID: r.DiffID, MaxBytes: orBound(r.MaxBytes, maxLayerBytes), MaxFiles: orBound(r.MaxFiles, maxLayerFiles),
		KeepFree: keep,
	})
}

// orBound is what was asked for, as far as the maker allows it; zero asks for that.
func orBound[N int | int64](asked, most N) N {
	if asked == 0 {
		return most
	}
	return min(asked, most)
}

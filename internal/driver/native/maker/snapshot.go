package maker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// sealAtOnce is up to what size a snapshot is hashed before its caller has an answer.
const sealAtOnce = 64 << 20

// Snapshot makes a template of a sandbox's files as they are now. Its processes wait only while they write and a copy is
// made; a paused one stays paused. The files of a sandbox are its tenant's, and so is the template.
func (m *Maker) Snapshot(ctx context.Context, r sandbox.SnapshotRequest) (*template.Template, error) {
	l, err := m.find(r.ID)
	if err != nil {
		return nil, err
	}
	if l.tenant != r.Tenant {
		return nil, fault.New(fault.NotFound, "no sandbox %s", r.ID)
	}
	if l.shell.disk == nil {
		return nil, errNoDisk
	}
	done, err := m.servePool(l)
	if err != nil {
		return nil, err
	}
	defer done()
	from := l.pool.template
	if err := m.templates.NameIsFree(r.Tenant, r.Name); err != nil { // before anything is copied
		return nil, err
	}
	if err := m.checkTenant(r.Tenant); err != nil {
		return nil, err
	}
	release, err := m.space.grantDir(m.templates.LayersDir(), l.shell.disk.copyBytes(1))
	if err != nil {
		return nil, err
	}
	defer release()
	frozen, err := m.freezeLive(l)
	if err != nil {
		return nil, err
	}
	defer frozen.close()
	images := append([]*frozenDisk{frozen}, frozen.below...)
	if err := checkDepth(from, len(images)); err != nil {
		return nil, err
	}
	t, err := m.templates.AddSnapshot(ctx, template.NewSnapshot{
		From: from, Tenant: r.Tenant, Name: r.Name, Description: r.Description, Above: len(images),
		Env: r.Env, User: r.User, Workdir: r.Workdir, Sudo: r.Sudo,
		Put: func(i int, path string) error { return append(images, l.pool.images...)[i].keep(path) },
	})
	if err != nil {
		return nil, err
	}
	seal := func() {
		if err := m.templates.Seal(m.life, r.Tenant, r.Name); err != nil && !m.isClosing() {
			m.log.Error("seal snapshot", "template", r.Name, "tenant", r.Tenant, "error", err)
		}
	}
	if frozen.bytes > sealAtOnce {
		m.wg.Go(seal)
	} else {
		seal()
	}
	return t, nil
}

// freezeLive copies a sandbox's disk to where templates lie.
func (m *Maker) freezeLive(l *live) (*frozenDisk, error) {
	// Not while it is being paused: what waits for the disk cannot be stopped.
	l.turn.RLock()
	defer l.turn.RUnlock()
	return l.shell.disk.freeze(m.templates.LayersDir(), l.shell.disk.still)
}

// keep gives the image a name: its own file where that is possible, else a copy.
func (f *frozenDisk) keep(path string) error {
	if err := linkFile(f.image, path); err == nil {
		return nil
	}
	// On another file system, or its name was removed since.
	image, err := copyImage(filepath.Dir(path), f.image, f.size)
	if err != nil {
		return err
	}
	defer image.Close()
	return linkFile(image, path)
}

// linkFile names a nameless file that is whole on disk.
func linkFile(f *os.File, path string) error {
	if err := f.Sync(); err != nil {
		return spaceless(err)
	}
	if err := unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &os.LinkError{Op: "link", Old: f.Name(), New: path, Err: err}
	}
	return nil
}

// RemoveTemplate removes a template that was made by Snapshot. What runs from it goes on.
func (m *Maker) RemoveTemplate(ctx context.Context, tenant, name string) error {
	t, err := m.templates.RemoveSnapshot(ctx, tenant, name)
	if err != nil {
		return err
	}
	m.mu.Lock()
	if p := m.pools[poolKey{tenant, t.Digest}]; p != nil {
		p.removed = true
	}
	m.mu.Unlock()
	m.putAway()
	return nil
}

// spaceless says in plain words that the host's disk is full.
func spaceless(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full: a copy of the sandbox's files does not fit")
	}
	return err
}

// countLayers is how many layers of maxLayers a template takes: an image counts once for all trees.
func countLayers(t *template.Template) int {
	images := len(t.Images())
	n := images
	for _, tree := range t.Trees {
		n += len(tree.Lower) - images
	}
	return n
}

// checkDepth refuses a template with so many disk images above it that no shell could have them all.
func checkDepth(t *template.Template, above int) error {
	for _, c := range []struct{ n, most int }{{len(t.Images()) + above, maxImages}, {countLayers(t) + above, maxLayers}} {
		if c.n > c.most {
			return fault.New(fault.Exhausted, "the sandbox's files would be %d layers deep, at most %d are possible: go back to an earlier sandbox or template", c.n, c.most)
		}
	}
	return nil
}

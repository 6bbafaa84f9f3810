package maker

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// diskSpace watches the file system that holds the disks of sandboxes. Their images are sparse, so
// together they may promise more than there is: what keeps the promise is a reserve that stays
// free. Starts are refused where it would be used, and watchSpace stops the sandboxes that write
// before a write of any sandbox can fail.
type diskSpace struct {
	dir   *os.File // on that file system
	total int64    // its size when the maker began

	mu        sync.Mutex
	reserve   int64 // what the operator says; zero: defaultReserve
	maxTenant int64 // zero: half of the file system
	disks     diskTotals
	kept      keptTotals
	granted   map[uint64]int64 // bytes of copies that are being made, by the device of their file system
}

// diskTotals are the disks of sandboxes that live.
type diskTotals struct {
	tenants  map[string]int64 // bytes on the host's disk
	promised int64            // what they may write beyond that
}

// keptTotals are what tenants have without a sandbox.
type keptTotals struct {
	snapshots map[string]int64 // by tenant
	volumes   map[string]int64 // by the name of the tenant's directory
	promised  int64            // what volumes may grow
}

// space is what a file system says of itself, in bytes and in inodes.
type space struct {
	total, free     int64  // free: for others than root
	files, newFiles uint64 // inodes, and those that are free; zero where there is no such limit
}

func (d *diskSpace) now() (space, error) { return spaceOf(d.dir) }

func spaceOf(dir *os.File) (space, error) {
	var st unix.Statfs_t
	err := hold(dir, func(fd int) error { return unix.Fstatfs(fd, &st) })
	return space{int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, st.Files, st.Ffree}, err
}

// Bounds of the reserve where the operator says none: enough for what is written between two looks
// and for the server's own files, and no more than a tenth of a small file system.
const (
	leastReserve = 1 << 30
	mostReserve  = 4 << 30
)

// Reserve is how many bytes of a file system of that size stay free; asked is what the operator
// says, zero if nothing.
func Reserve(asked, total int64) int64 { return cmp.Or(asked, defaultReserve(total)) }

func defaultReserve(total int64) int64 {
	return min(max(total/20, leastReserve), mostReserve, total/10)
}

// spaceMarks are amounts of free bytes, from the highest to the lowest.
type spaceMarks struct {
	refuse int64 // below it nothing new is started: the reserve
	resume int64 // from it on, sandboxes that were stopped go on
	stop   int64 // below it, sandboxes that write are stopped
	end    int64 // below it, the sandbox that wrote most is ended at once
}

func marksOf(reserve int64) spaceMarks {
	return spaceMarks{refuse: reserve, resume: reserve / 4 * 3, stop: reserve / 2, end: reserve / 4}
}

func (d *diskSpace) marks(s space) spaceMarks {
	d.mu.Lock()
	defer d.mu.Unlock()
	return marksOf(Reserve(d.reserve, s.total))
}

// check refuses what would write so many bytes and leave less than the reserve, and anything where
// the file system is short of inodes.
func (d *diskSpace) check(bytes int64) error {
	release, err := d.grant(bytes)
	if err == nil {
		release()
	}
	return err
}

// grant refuses a copy that would leave less than the reserve, and keeps its space until release is
// called: of copies that begin at the same time each would see the same free bytes. What a copy has
// written already counts twice until then.
func (d *diskSpace) grant(bytes int64) (release func(), err error) { return d.grantAt(d.dir, bytes) }

func (d *diskSpace) grantAt(dir *os.File, bytes int64) (release func(), err error) {
	device, err := deviceOf(dir)
	if err != nil {
		return nil, fmt.Errorf("look at the disk's free space: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s, err := spaceOf(dir)
	if err != nil {
		return nil, fmt.Errorf("look at the disk's free space: %w", err)
	}
	if err := diskspace.CheckFiles(s.files, s.newFiles); err != nil {
		return nil, err
	}
	granted, reserve := d.granted[device], Reserve(d.reserve, s.total)
	if s.free-granted-bytes < reserve {
		why := fmt.Errorf("%d bytes of %d are free, %d are being copied, %d are asked for and %d are kept free", s.free, s.total, granted, bytes, reserve)
		return nil, fault.Wrap(fault.DiskFull, why, "the server's disk is full: it takes nothing new until there is more space")
	}
	if bytes == 0 {
		return func() {}, nil
	}
	d.granted[device] += bytes
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.granted[device] -= bytes; d.granted[device] == 0 {
			delete(d.granted, device)
		}
	}), nil
}

// grantDir does the same for a directory that may lie on another file system.
func (d *diskSpace) grantDir(path string, bytes int64) (release func(), err error) {
	dir, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return d.grant(bytes)
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return d.grantAt(dir, bytes)
}

func deviceOf(dir *os.File) (uint64, error) {
	var st unix.Stat_t
	err := hold(dir, func(fd int) error { return unix.Fstat(fd, &st) })
	return st.Dev, err
}

// keepFree is the reserve of the file system of a directory.
func (d *diskSpace) keepFree(path string) (int64, error) {
	dir, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	s, err := spaceOf(dir)
	return d.marks(s).refuse, err
}

// keptEvery is how often snapshots and volumes are counted.
const keptEvery = 10 * time.Second

// countKept counts snapshots and volumes until the maker closes.
func (m *Maker) countKept() {
	tick := time.NewTicker(keptEvery)
	defer tick.Stop()
	for {
		kept := m.keptNow()
		m.space.mu.Lock()
		m.space.kept = kept
		m.space.mu.Unlock()
		select {
		case <-tick.C:
		case <-m.closed:
			return
		}
	}
}

func (m *Maker) keptNow() keptTotals {
	kept := keptTotals{snapshots: map[string]int64{}, volumes: map[string]int64{}}
	for _, info := range m.templates.All() {
		if info.Source == template.SourceSnapshot {
			kept.snapshots[info.Tenant] += info.Bytes
		}
	}
	paths, _ := filepath.Glob(filepath.Join(m.volumes.dir, "*", "*"+volumeSuffix))
	for _, path := range paths {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			has := st.Blocks * 512
			kept.volumes[filepath.Base(filepath.Dir(path))] += has
			kept.promised += max(st.Size-has, 0)
		}
	}
	return kept
}

// checkTenant refuses something new to a tenant that has as much on the host's disk as one may
// have.
func (m *Maker) checkTenant(tenant string) error {
	dir := filepath.Base(m.volumes.tenantDir(tenant))
	d := m.space
	d.mu.Lock()
	has, most := d.disks.tenants[tenant]+d.kept.snapshots[tenant]+d.kept.volumes[dir], cmp.Or(d.maxTenant, d.total/2)
	d.mu.Unlock()
	if has < most {
		return nil
	}
	return fault.New(fault.Exhausted, "your sandboxes, volumes and snapshots have %d MiB on the server's disk, and this server allows %d: end or remove some", has>>20, most>>20)
}

// stats are how full the disk is and what is promised of it.
func (d *diskSpace) stats(unwritten int64) *wire.DiskStats {
	s, err := d.now()
	if err != nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	stats := &wire.DiskStats{
		Total: s.total, Free: s.free, Reserve: Reserve(d.reserve, s.total), Unwritten: unwritten,
		Promised: d.disks.promised + d.kept.promised,
	}
	for _, all := range []map[string]int64{d.disks.tenants, d.kept.snapshots, d.kept.volumes} {
		for _, n := range all {
			stats.Used += n
		}
	}
	return stats
}

// copyBytes is how much space so many copies of the disk take. The disk itself goes on and a large
// one is copied once.
func (k *disk) copyBytes(n int) int64 {
	bytes := allocated(k.image)
	switch {
	case k.disks.reflink:
		return 0
	case bytes > smallLayer:
		return bytes
	default:
		return bytes * int64(n)
	}
}

// shutDown has an ext4 take no more writes, and drop what is in memory only and in no transaction
// that has been committed.
func shutDown(root *os.File) {
	const noLogFlush = 2
	flags := uint32(noLogFlush)
	_ = hold(root, func(fd int) error { return unix.IoctlSetPointerInt(fd, ext4Shutdown, int(flags)) }) // one that is gone takes none
}

// ext4Shutdown is EXT4_IOC_SHUTDOWN of fs/ext4/ext4.h.
const ext4Shutdown = 0x8004587d

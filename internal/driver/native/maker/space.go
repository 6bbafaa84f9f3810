package maker

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// diskSpace watches the file system that holds the disks of sandboxes. Their images are sparse, so
// together they may promise more than there is: what keeps the promise is a reserve that stays
// free. Starts are refused where it would be used, and watchSpace stops the sandboxes that write
// before a write of any sandbox can fail.
type diskSpace struct {
	dir *os.File // on that file system

	mu      sync.Mutex
	reserve int64 // what the operator says; zero: defaultReserve
	tenants map[string]int64
	promise int64
}

// space is what a file system says of itself, in bytes.
type space struct {
	total int64
	free  int64 // for others than root
}

func (d *diskSpace) now() (space, error) { return spaceOf(d.dir) }

func spaceOf(dir *os.File) (space, error) {
	var st unix.Statfs_t
	err := hold(dir, func(fd int) error { return unix.Fstatfs(fd, &st) })
	return space{int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize}, err
}

// Bounds of the reserve where the operator says none: enough for what is written between two looks
// and for the server's own files, and no more than a tenth of a small file system.
const (
	leastReserve = 1 << 30
	mostReserve  = 4 << 30
)

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
	return marksOf(cmp.Or(d.reserve, defaultReserve(s.total)))
}

// check refuses what would write so many bytes and leave less than the reserve.
func (d *diskSpace) check(bytes int64) error { return d.checkAt(d.dir, bytes) }

func (d *diskSpace) checkAt(dir *os.File, bytes int64) error {
	s, err := spaceOf(dir)
	if err != nil {
		return fmt.Errorf("look at the disk's free space: %w", err)
	}
	if m := d.marks(s); s.free-bytes < m.refuse {
		why := fmt.Errorf("%d bytes of %d are free, %d are asked for and %d are kept free", s.free, s.total, bytes, m.refuse)
		return fault.Wrap(fault.DiskFull, why, "the server's disk is full: it takes nothing new until there is more space")
	}
	return nil
}

// checkDir does the same for a directory that may lie on another file system.
func (d *diskSpace) checkDir(path string, bytes int64) error {
	dir, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return d.check(bytes)
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return d.checkAt(dir, bytes)
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

// cutOff takes the file system away from those who use it: what they have written and is not on the
// device yet is dropped, and nothing reaches the image any more. It is for a sandbox that ends.
func (k *disk) cutOff() {
	const noLogFlush = 2
	flags := uint32(noLogFlush)
	_ = hold(k.root, func(fd int) error { return unix.IoctlSetPointerInt(fd, ext4Shutdown, int(flags)) })
}

// ext4Shutdown is EXT4_IOC_SHUTDOWN of fs/ext4/ext4.h.
const ext4Shutdown = 0x8004587d

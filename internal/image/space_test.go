package image_test

import (
	"archive/tar"
	"sync"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
)

// fullDisk has room for so many bytes, whoever asks for them.
type fullDisk struct {
	mu   sync.Mutex
	room int64
}

func (d *fullDisk) take(bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if bytes > d.room {
		return fault.New(fault.DiskFull, "the server's disk is full")
	}
	return nil
}

func (d *fullDisk) set(room int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.room = room
}

func TestSpace_Refused(t *testing.T) {
	p := newPlace(t)
	disk := &fullDisk{}
	w := open(t, func(c *image.Config) { c.Space = disk.take })
	large := p.push(t, "large:v1", newImage(t, 1, 3<<20))
	archive := tarOf(t, tar.Header{Name: "f", Uname: "x"})
	for claim, c := range map[string]struct {
		room int64
		do   func() error
	}{
		"a layer larger than what is free": {2 << 20, func() error { _, err := w.pull(acme, large); return err }},
		"a layer below the reserve":        {-1, func() error { _, err := w.pull(acme, large); return err }},
		"an archive below the reserve":     {-1, func() error { _, err := w.importAll("rootfs", archive); return err }},
	} {
		t.Run(claim, func(t *testing.T) {
			disk.set(c.room)
			wantKind(t, c.do(), fault.DiskFull, "the server's disk is full")
			if left := w.left(); len(left) != 0 {
				t.Errorf("%v is left", left)
			}
		})
	}
	disk.set(8 << 20)
	if _, err := w.pull(acme, large); err != nil {
		t.Errorf("when there is space again: %v", err)
	}
}

// TestSpace_EachMiB has the disk fill up while a file arrives: more of it is not asked for at once.
func TestSpace_EachMiB(t *testing.T) {
	p := newPlace(t)
	var mu sync.Mutex
	asked, most := int64(0), int64(0)
	w := open(t, func(c *image.Config) {
		c.Space = func(bytes int64) error {
			mu.Lock()
			defer mu.Unlock()
			if asked++; asked > 3 {
				return fault.New(fault.DiskFull, "the server's disk is full")
			}
			if asked > 1 { // the first is about all of it
				most = max(most, bytes)
			}
			return nil
		}
	})
	_, err := w.pull(acme, p.push(t, "large:v1", newImage(t, 1, 8<<20)))
	wantKind(t, err, fault.DiskFull, "the server's disk is full")
	if most > 1<<20 {
		t.Errorf("%d bytes were asked for at once", most)
	}
}

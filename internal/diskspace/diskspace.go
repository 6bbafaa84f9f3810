// Package diskspace has the server's parts ask before they take more of the host's disk. It knows
// no file system: what is free, and what stays free, the caller's Check knows.
package diskspace

import (
	"fmt"
	"io"

	"github.com/covehq/cove/internal/fault"
)

// Check refuses to write so many bytes more where the disk has no room for them. It fails with
// fault.DiskFull. A nil Check refuses nothing.
type Check func(bytes int64) error

// FileBytes is what a stored file counts besides its content: an empty one takes an inode too.
const FileBytes = 4 << 10

// Charge is what stored files count against a tenant's quota. It is linear, so a sum of sizes and a
// number of files are all that has to be remembered to give back what was charged.
func Charge(bytes int64, files int) int64 { return bytes + int64(files)*FileBytes }

// CheckFiles fails with fault.DiskFull where fewer than 2 % of a file system's inodes are free. All
// tenants share them, and they may run out long before the bytes do. File systems that make inodes
// as they need them, such as btrfs, report a total of zero: they are never short.
func CheckFiles(total, free uint64) error {
	keep := total / 50
	if free >= keep {
		return nil
	}
	why := fmt.Errorf("%d inodes of %d are free and %d are kept free", free, total, keep)
	return fault.Wrap(fault.DiskFull, why, "the server's disk is full of files: it takes nothing new until some are removed, also empty ones")
}

// Allow asks the check.
func (c Check) Allow(bytes int64) error {
	if c == nil {
		return nil
	}
	return c(bytes)
}

// Step is how many bytes a Meter asks for at once. So much of each file may be on its way beyond
// what the check allows, because files that are written at the same time see the same free space.
const Step = 1 << 20

// Meter asks a check while one file grows. It is for one writer at a time.
type Meter struct {
	check Check
	left  int64 // bytes that may be written before the check is asked again
}

// NewMeter makes a meter of a check.
func NewMeter(c Check) *Meter { return &Meter{check: c} }

// Begin refuses a file that cannot have its first bytes.
func (m *Meter) Begin() error { return m.ask(Step) }

// Take refuses to write so many bytes where the disk has no room for them.
func (m *Meter) Take(bytes int64) error {
	if m.left < bytes {
		if err := m.ask(max(bytes, Step)); err != nil {
			return err
		}
	}
	m.left -= bytes
	return nil
}

func (m *Meter) ask(bytes int64) error {
	if err := m.check.Allow(bytes); err != nil {
		return err
	}
	m.left = bytes
	return nil
}

// Writer is a writer that takes what it writes from the meter.
func (m *Meter) Writer(to io.Writer) io.Writer { return writer{to, m} }

type writer struct {
	to    io.Writer
	meter *Meter
}

func (w writer) Write(p []byte) (int, error) {
	if err := w.meter.Take(int64(len(p))); err != nil {
		return 0, err
	}
	return w.to.Write(p)
}

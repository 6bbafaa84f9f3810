package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// DpkgDir is the database of the host's package manager on Debian and its descendants.
const DpkgDir = "/var/lib/dpkg"

// dpkgLocks are the files of a database that dpkg and apt hold a lock on while they change it.
var dpkgLocks = []string{"lock-frontend", "lock"}

// dpkgPatience is how long a build waits for the host's package manager, and dpkgLook how often it looks. Variables for
// tests.
var (
	dpkgPatience = time.Minute
	dpkgLook     = 100 * time.Millisecond
)

// ErrDpkgBusy is in the error of a build that waited for the host's package manager in vain.
var ErrDpkgBusy = errors.New("the host's package manager is at work")

// DpkgBusy tells whether the host's package manager is changing a database. Others than root cannot tell.
func DpkgBusy(dir string) bool {
	return slices.ContainsFunc(dpkgLocks, func(name string) bool { return lockedByOther(filepath.Join(dir, name)) })
}

// DpkgInterrupted tells whether an earlier change of a database was cut short. dpkg in a sandbox with a copy of it refuses
// every work until `dpkg --configure -a`.
func DpkgInterrupted(dir string) bool {
	entries, _ := os.ReadDir(filepath.Join(dir, "updates")) // not there: not a database
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.Trim(e.Name(), "0123456789") == "" })
}

// isDpkg tells whether a directory is a package database.
func isDpkg(dir string) bool {
	for _, name := range []string{"status", "updates"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

// copyDpkg copies a package database at rest: a copy that was made while packages were installed breaks apt in every
// sandbox. It takes no lock, so that an installation that begins meanwhile does not fail; the copy is made again then.
func (l *layer) copyDpkg(ctx context.Context, dir string, progress func(Progress), copyTree func() error) error {
	waiting, cancel := context.WithTimeout(ctx, dpkgPatience)
	defer cancel()
	for told := false; ; {
		before := dpkgStamp(dir)
		if !DpkgBusy(dir) {
			if DpkgInterrupted(dir) {
				return fault.New(fault.Unavailable, "the host's package manager was interrupted, and %s is half changed: run `dpkg --configure -a`", dir)
			}
			if err := copyTree(); err != nil {
				return err
			}
			if !DpkgBusy(dir) && dpkgStamp(dir) == before {
				return nil
			}
			if err := os.RemoveAll(l.place(dir)); err != nil {
				return err
			}
		}
		if !told {
			told = true
			progress(Progress{Step: StepWait, Message: "the host's package manager is at work"})
		}
		select {
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fault.Wrap(fault.Unavailable, ErrDpkgBusy, "the host's package manager has changed %s for %v; a template is built when it has finished", dir, dpkgPatience)
		case <-time.After(dpkgLook):
		}
	}
}

// dpkgStamp changes with each package that is unpacked or configured.
func dpkgStamp(dir string) string {
	var all []string
	for _, name := range []string{"status", "updates", "info", "triggers"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil {
			all = append(all, fmt.Sprintf("%s %d %d", name, info.Size(), info.ModTime().UnixNano()))
		}
	}
	return digestOf(all)
}

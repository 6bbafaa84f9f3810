package app

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/template"
)

// hostLimits is what this host has to give: a sandbox that asks for more would be promised what cannot be.
func hostLimits(dataDir string) template.Limits {
	most := template.Limits{CPUs: float64(runtime.NumCPU())}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		most.MemoryBytes = int64(uint64(info.Totalram) * uint64(info.Unit))
	}
	var disk unix.Statfs_t
	if unix.Statfs(dataDir, &disk) == nil {
		most.DiskBytes = int64(disk.Blocks) * disk.Bsize
	}
	return most
}

// diskFree is what sandboxes can still write.
func diskFree(dataDir string) (int64, bool) {
	var disk unix.Statfs_t
	if unix.Statfs(dataDir, &disk) != nil {
		return 0, false
	}
	return int64(disk.Bavail) * disk.Bsize, true
}

// diskFiles are the inodes of the file system of the data directory, and those that are free.
func diskFiles(dataDir string) (total, free uint64) {
	var disk unix.Statfs_t
	if unix.Statfs(dataDir, &disk) != nil {
		return 0, 0
	}
	return disk.Files, disk.Ffree
}

// diskSize is the size of the file system of the data directory.
func diskSize(dataDir string) int64 {
	var disk unix.Statfs_t
	if unix.Statfs(dataDir, &disk) != nil {
		return 0
	}
	return int64(disk.Blocks) * disk.Bsize
}

// takeSpace makes a file whose blocks are the disk's from now on.
func takeSpace(path string, bytes int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, bytes), f.Close())
}

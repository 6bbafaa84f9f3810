package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// stage is a thread with a mount namespace of its own, from which peers are started: what is mounted for them is theirs
// alone and is gone with them, however this program ends.
type stage struct {
	calls chan func()
	done  chan struct{}
	next  atomic.Int64
	err   error // why there is none
}

func newStage() *stage {
	s := &stage{calls: make(chan func()), done: make(chan struct{})}
	begun := make(chan struct{})
	go func() {
		defer close(s.done)
		runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
		s.err = settleStage()
		close(begun)
		for call := range s.calls {
			call()
		}
	}()
	<-begun
	return s
}

// do calls f on the stage's thread; processes that it starts see the stage's mounts.
func (s *stage) do(f func() error) (err error) {
	if s.err != nil {
		return s.err
	}
	ready := make(chan struct{})
	s.calls <- func() {
		defer close(ready)
		err = f()
	}
	<-ready
	return err
}

// name is one that no other environment of this run has.
func (s *stage) name() string { return fmt.Sprintf("cove-bench-%d-%d", os.Getpid(), s.next.Add(1)) }

func (s *stage) close() {
	close(s.calls)
	<-s.done
}

func settleStage() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Engines keep sockets and locks in /run; theirs shall not meet those of an engine that serves this host.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return hideUnified()
}

// hideUnified hides the second cgroup tree of a host that has both: crun refuses such a host when a controller is in it.
func hideUnified() error {
	const unified = "/sys/fs/cgroup/unified"
	var st unix.Statfs_t
	if unix.Statfs(unified, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil
	}
	if err := unix.Mount("tmpfs", unified, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("hide %s: %w", unified, err)
	}
	return nil
}

// mountLayers puts directories over each other, read-only, the uppermost first.
func mountLayers(target string, layers []string) error {
	if len(layers) == 1 {
		if err := unix.Mount(layers[0], target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", target, err)
		}
		return nil
	}
	err := unix.Mount("overlay", target, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(layers, ":"))
	if err != nil {
		return fmt.Errorf("overlay %s: %w", target, err)
	}
	return nil
}

package agent

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// exit is how a child ended.
type exit struct {
	status syscall.WaitStatus
	usage  syscall.Rusage
	at     time.Time
}

// reaper collects ended children, told by SIGCHLD. As PID 1 it collects orphans too; otherwise only its own, because
// the process it lives in has others.
type reaper struct {
	all  bool
	sigs chan os.Signal
	quit chan struct{}

	// starting is held for reading from before a fork until the child is in the table, and for writing while
	// collecting: no child is collected before its owner is known.
	starting sync.RWMutex

	mu       sync.Mutex
	children map[int]func(exit)
}

func newReaper(all bool) *reaper {
	r := &reaper{all: all, sigs: make(chan os.Signal, 1), quit: make(chan struct{}), children: map[int]func(exit){}}
	signal.Notify(r.sigs, syscall.SIGCHLD)
	return r
}

func (r *reaper) close() {
	signal.Stop(r.sigs)
	close(r.quit)
}

func (r *reaper) run() {
	for {
		r.collect()
		select {
		case <-r.sigs:
		case <-r.quit:
			return
		}
	}
}

// start forks and has onExit called once with the child's end; onExit must not block.
func (r *reaper) start(fork func() (int, error), onExit func(exit)) (int, error) {
	r.starting.RLock()
	defer r.starting.RUnlock()
	pid, err := fork()
	if err != nil {
		return 0, err
	}
	r.mu.Lock()
	r.children[pid] = onExit
	r.mu.Unlock()
	return pid, nil
}

// signal reaches a child that has not been collected: its pid cannot have become another's.
func (r *reaper) signal(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.children[pid]; !ok {
		return syscall.ESRCH
	}
	return syscall.Kill(pid, sig)
}

// signalGroup reaches the group that a child is in, which is never the agent's own.
func (r *reaper) signalGroup(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.children[pid]; !ok {
		return syscall.ESRCH
	}
	group, err := syscall.Getpgid(pid)
	if err != nil {
		return err
	}
	if group == syscall.Getpgrp() { // only a child that joined it by itself is there
		return syscall.Kill(pid, sig)
	}
	return syscall.Kill(-group, sig)
}

// alive reports whether a child has not been collected.
func (r *reaper) alive(pid int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.children[pid]
	return ok
}

func (r *reaper) collect() {
	r.starting.Lock()
	r.mu.Lock()
	var calls []func()
	if r.all {
		for pid, e := range wait(-1) {
			calls = r.take(calls, pid, e)
		}
	} else {
		for child := range r.children {
			for pid, e := range wait(child) {
				calls = r.take(calls, pid, e)
			}
		}
	}
	r.mu.Unlock()
	r.starting.Unlock()
	for _, call := range calls {
		call()
	}
}

func (r *reaper) take(calls []func(), pid int, e exit) []func() {
	onExit, ok := r.children[pid]
	if !ok {
		return calls // an orphan that was reparented to us
	}
	delete(r.children, pid)
	return append(calls, func() { onExit(e) })
}

// wait yields ended children among target (−1: any) without blocking.
func wait(target int) func(yield func(int, exit) bool) {
	return func(yield func(int, exit) bool) {
		for {
			var e exit
			pid, err := retry(func() (int, error) {
				return syscall.Wait4(target, &e.status, syscall.WNOHANG, &e.usage)
			})
			if err != nil || pid <= 0 {
				return
			}
			e.at = time.Now()
			if !yield(pid, e) || target > 0 {
				return
			}
		}
	}
}

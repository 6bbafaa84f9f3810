package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// down ends a cluster in whatever state it is, and does nothing where there is none. It goes on after a failure: what it
// can remove it removes.
func (c *cluster) down(ctx context.Context) error {
	if _, err := os.Stat(c.dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if !c.bare && os.Geteuid() != 0 {
		return errors.New("a node needs root, its end too: run it with sudo")
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c.deletePods(ctx)
	var failed error
	for _, name := range stopping {
		failed = errors.Join(failed, c.end(ctx, name, syscall.SIGTERM, 15*time.Second))
	}
	if !c.bare {
		failed = errors.Join(failed, c.endContainers(ctx), c.unmount(), removeGroups(ctx), removeNetwork(ctx), c.restoreSysctls(), removeTraces(), os.RemoveAll(postgresDir()))
	}
	if failed != nil {
		return failed // the directory stays: it says what the machine's settings were
	}
	if err := os.RemoveAll(c.dir); err != nil {
		return err
	}
	c.say("ended")
	return nil
}

// deletePods asks the kubelet to end all Pods in order, which it does better than endContainers; but that works without it.
func (c *cluster) deletePods(ctx context.Context) {
	if c.bare || !alive(c.recorded("kubelet")) || !alive(c.recorded("kube-apiserver")) {
		return
	}
	// Whoever would make new ones must not.
	if err := c.end(ctx, "kube-controller-manager", syscall.SIGTERM, 10*time.Second); err != nil {
		c.say("%v", err)
	}
	if _, err := c.kubectl(ctx, "delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout=20s"); err != nil {
		c.say("not every Pod ended in order: %v", err)
	}
}

// groups are where the containers' processes are counted, in every hierarchy.
func groups() []string {
	v1, _ := filepath.Glob("/sys/fs/cgroup/*/kubepods")
	v2, _ := filepath.Glob("/sys/fs/cgroup/kubepods")
	return append(v1, v2...)
}

// endContainers ends what outlives kubelet and containerd: the shims, known by the socket in their arguments, and the
// processes of Pods, known by their cgroup.
func (c *cluster) endContainers(ctx context.Context) error {
	return until(ctx, 20*time.Second, "processes of Pods", func(context.Context) (bool, error) {
		left := append(c.shims(), c.members()...)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0, fmt.Errorf("%d are left", len(left))
	})
}

func (c *cluster) shims() []int {
	var found []int
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range dirs {
		words, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(words, []byte("containerd-shim")) || !bytes.Contains(words, []byte("\x00"+c.socket()+"\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			found = append(found, pid)
		}
	}
	return found
}

// members are the processes in the cgroups of Pods.
func (c *cluster) members() []int {
	var found []int
	for _, top := range groups() {
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.Name() != "cgroup.procs" {
				return nil // it has just gone
			}
			data, _ := os.ReadFile(path)
			for word := range strings.FieldsSeq(string(data)) {
				if pid, err := strconv.Atoi(word); err == nil && pid > 0 && startTime(pid) != "" {
					found = append(found, pid)
				}
			}
			return nil
		})
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// unmount lets go of everything mounted below the directory, what was mounted last first.
func (c *cluster) unmount() error {
	var failed error
	for _, point := range slices.Backward(mountsBelow(c.dir)) {
		if err := syscall.Unmount(point, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			failed = errors.Join(failed, fmt.Errorf("unmount %s: %w", point, err))
		}
	}
	if left := mountsBelow(c.dir); len(left) > 0 {
		failed = errors.Join(failed, fmt.Errorf("still mounted: %s", strings.Join(left, ", ")))
	}
	return failed
}

func mountsBelow(dir string) []string {
	data, _ := os.ReadFile("/proc/self/mounts")
	var points []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) > 1 && strings.HasPrefix(fields[1], dir+"/") {
			points = append(points, fields[1])
		}
	}
	return points
}

// removeGroups waits for the last process to leave: the kernel tells nobody.
func removeGroups(ctx context.Context) error {
	return until(ctx, 20*time.Second, "cgroups of Pods", func(context.Context) (bool, error) {
		left := groups()
		for _, top := range left {
			var dirs []string
			_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			for _, dir := range slices.Backward(dirs) {
				_ = syscall.Rmdir(dir)
			}
		}
		left = groups()
		return len(left) == 0, errors.New(strings.Join(left, ", "))
	})
}

// removeTraces removes the few files that go where nobody can say otherwise. Other things in these directories stay.
func removeTraces() error {
	results, _ := filepath.Glob("/var/lib/cni/results/" + namespace + "-*")
	var failed error
	for _, file := range results {
		failed = errors.Join(failed, remove(file))
	}
	failed = errors.Join(failed, remove("/var/lib/kubelet/device-plugins/kubelet.sock"))
	for _, dir := range []string{"/var/lib/kubelet/device-plugins", "/var/lib/kubelet", "/var/lib/cni/results", "/var/lib/cni"} {
		_ = os.Remove(dir) // only when empty
	}
	return failed
}

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// programs are the names by which the one program is called.
var programs = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "network-policy", "kubectl"}

// buildKube compiles Kubernetes into the cache unless it is there: some nine minutes on two processors, once.
func (c *cluster) buildKube(ctx context.Context) error {
	if c.built() {
		return nil
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if c.built() {
		return nil // somebody else built it meanwhile
	}
	if err := os.MkdirAll(c.bin, 0o755); err != nil {
		return err
	}
	c.say("building Kubernetes %s once, into %s: this takes about ten minutes", version, c.bin)
	minor := strings.Split(version, ".")[1]
	flags := "-s -w" // without the rest the parts would call themselves v0.0.0
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %s.gitVersion=v%s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=%[3]s -X %[1]s.gitTreeState=clean", pkg, version, minor)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-mod=readonly", "-trimpath", "-ldflags", flags, "-o", filepath.Join(c.bin, "kube"), ".")
	cmd.Dir = filepath.Join(c.repo, "test/cluster/kube")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOGC=400")
	cmd.Stdout, cmd.Stderr = c.log, c.log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build Kubernetes: %w", err)
	}
	return c.linkKube()
}

func (c *cluster) built() bool { return !missing(filepath.Join(c.bin, "kubectl")) }

// linkKube gives the program its names, kubectl last: it is what tells that all is done.
func (c *cluster) linkKube() error {
	for _, name := range programs {
		path := filepath.Join(c.bin, name)
		if err := remove(path); err != nil {
			return err
		}
		if err := os.Symlink("kube", path); err != nil {
			return err
		}
	}
	current := filepath.Join(c.cache, "current")
	if err := remove(current); err != nil {
		return err
	}
	return os.Symlink(filepath.Dir(c.bin), current)
}

// lock lets one builder in at a time.
func (c *cluster) lock() (func(), error) {
	if err := os.MkdirAll(c.cache, 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(c.cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		file.Close()
		return nil, fmt.Errorf("wait for another build: %w", err)
	}
	return func() { file.Close() }, nil
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// packages are Debian's names of what Kubernetes needs from the machine, each with a file that tells whether it is there.
var packages = []struct{ name, file string }{
	{"containerd", "containerd"}, {"runc", "runc"}, {"containernetworking-plugins", "/usr/lib/cni/ptp"}, {"iproute2", "ip"},
	{"ipset", "ipset"}, {"iptables", "iptables"}, {"nftables", "nft"}, {"procps", "sysctl"}, {"python3-pip", "pip3"}, {"util-linux", "nsenter"},
}

// able says what this machine lacks, and installs programs that it can.
func (c *cluster) able(ctx context.Context) error {
	if c.bare {
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New("a node needs root: run it with sudo")
	}
	if missing(c.dir) && len(groups()) > 0 {
		return errors.New("another kubelet runs Pods on this machine, and two of them do not get along")
	}
	if known, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(known), "overlay") {
		return errors.New("containerd needs overlayfs, which this kernel does not have: try modprobe overlay")
	}
	if memory, err := availableMemory(); err != nil || memory < neededMemory {
		return fmt.Errorf("a cluster needs %d MiB of available memory, and there are %d", neededMemory>>20, memory>>20)
	}
	if err := os.MkdirAll(c.cache, 0o755); err != nil {
		return err
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(c.cache, &disk); err != nil || int64(disk.Bavail)*disk.Bsize < neededDiskSpace {
		return fmt.Errorf("a cluster needs %d MiB of disk below %s", neededDiskSpace>>20, c.cache)
	}
	return c.install(ctx)
}

func availableMemory() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "MemAvailable:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/meminfo has no MemAvailable")
}

func (c *cluster) install(ctx context.Context) error {
	var missing []string
	for _, p := range packages {
		if _, err := exec.LookPath(p.file); err != nil {
			missing = append(missing, p.name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	c.say("installing %s", strings.Join(missing, " "))
	args := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
	if _, err := tell(ctx, "apt-get", args...); err == nil {
		return nil
	}
	// The lists of a fresh machine are empty or old.
	if _, err := tell(ctx, "apt-get", "update"); err != nil {
		c.say("some package lists could not be updated; trying with those there are")
	}
	if _, err := tell(ctx, "apt-get", args...); err != nil {
		return fmt.Errorf("install %s, which a node needs: %w", strings.Join(missing, " "), err)
	}
	return nil
}

// sysctls are what a kubelet sets for the whole machine.
var sysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// saveSysctls remembers them. A file that is there already holds the true ones: the last cluster did not end well.
func (c *cluster) saveSysctls() error {
	if _, err := os.Stat(c.path("sysctls")); err == nil {
		return nil
	}
	values := map[string]string{}
	for _, name := range sysctls {
		if data, err := os.ReadFile("/proc/sys/" + name); err == nil {
			values[name] = strings.TrimSpace(string(data))
		}
	}
	return c.writeJSON("sysctls", values)
}

func (c *cluster) restoreSysctls() error {
	data, err := os.ReadFile(c.path("sysctls"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	values := map[string]string{}
	if err := errors.Join(err, json.Unmarshal(data, &values)); err != nil {
		return fmt.Errorf("what the kernel's settings were: %w", err)
	}
	var failed error
	for name, value := range values {
		now, err := os.ReadFile("/proc/sys/" + name)
		if err == nil && strings.TrimSpace(string(now)) != value {
			err = os.WriteFile("/proc/sys/"+name, []byte(value), 0o644)
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

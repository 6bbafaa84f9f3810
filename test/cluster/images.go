package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// imageFile is where an image of the tests is kept: under a name that changes with what it is made from.
func (c *cluster) imageFile(name string) string {
	made := map[string][]string{
		"pause":   {"test/cluster/pause/main.go"},
		"sandbox": {"test/cluster/sandbox-rootfs", "internal/template/defaults/python.lock"},
	}
	key, err := digest(c.repo, append(made[name], "deploy/image/main.go")...)
	if err != nil {
		key = "unknown" // building it says why
	}
	return filepath.Join(c.cache, "images", name+"-"+key+".tar")
}

// buildImages makes the two images that every test needs, without pulling anything: the pause of Pods, and a sandbox's
// userland with Python and pandas.
func (c *cluster) buildImages(ctx context.Context) error {
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	work, err := os.MkdirTemp("", "cove-image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.MkdirAll(filepath.Join(c.cache, "images"), 0o755); err != nil {
		return err
	}
	if file := c.imageFile("pause"); missing(file) {
		pause := filepath.Join(work, "pause")
		if err := c.run(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", pause, "./test/cluster/pause"); err != nil {
			return err
		}
		if err := c.run(ctx, "go", "run", "./deploy/image", "-o", file, "-tag", pauseImage, "-entrypoint", "/pause", pause+"=/pause"); err != nil {
			return err
		}
	}
	file := c.imageFile("sandbox")
	if !missing(file) {
		return nil
	}
	c.say("making the image of sandboxes once, from Debian's packages")
	root := filepath.Join(work, "root")
	if err := c.run(ctx, "test/cluster/sandbox-rootfs", filepath.Join(c.repo, "internal/template/defaults/python.lock"), root); err != nil {
		return err
	}
	return c.pruned(file, c.run(ctx, "go", "run", "./deploy/image", "-o", file, "-tag", sandboxImage, "-user", "1000", "-workdir", "/home/user",
		"-env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "-env", "LANG=C.UTF-8", "-env", "MPLBACKEND=agg", "-entrypoint", "/bin/bash", "-tree", root))
}

// pruned removes images of sandboxes that were made from something else: each is large.
func (c *cluster) pruned(file string, err error) error {
	if err != nil {
		return err
	}
	old, _ := filepath.Glob(filepath.Join(filepath.Dir(file), "sandbox-*.tar"))
	for _, other := range old {
		if other != file {
			err = errors.Join(err, remove(other))
		}
	}
	return err
}

func missing(file string) bool {
	_, err := os.Stat(file)
	return errors.Is(err, os.ErrNotExist)
}

// run is for steps whose own words are for whoever watches.
func (c *cluster) run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.repo, c.log, c.log
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if filepath.Base(name) != name {
		cmd.Path = filepath.Join(c.repo, name)
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// importImages gives the node images; there is no registry to pull them from.
func (c *cluster) importImages(ctx context.Context, files ...string) error {
	for _, file := range files {
		if _, err := tell(ctx, "ctr", "--address", c.socket(), "--namespace", "k8s.io", "images", "import", file); err != nil {
			return err
		}
	}
	return nil
}

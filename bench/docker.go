package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/template"
)

// docker is an engine of our own: its files, sockets and, by a network namespace, its bridge and packet filter are apart
// from those of an engine that serves this host.
type docker struct {
	dir    string
	cli    string
	daemon *os.Process   // nil: none was started
	ended  chan struct{} // closed when it was waited for
}

// image is the name of the one that is made of the template's files.
const image = "cove-bench"

// limits are the template's; where it has none, those that a sandbox gets.
func (p *peers) limits() template.Limits {
	l := p.tmpl.Limits
	return template.Limits{CPUs: cmp.Or(l.CPUs, 1), MemoryBytes: cmp.Or(l.MemoryBytes, 512<<20), Pids: cmp.Or(l.Pids, 256)}
}

// engine is `docker run`: a writable layer, the default network, the default filter.
func (p *peers) engine(ctx context.Context) *peer {
	x := &peer{name: "docker"}
	daemon, err := exec.LookPath("dockerd")
	if err != nil {
		x.skip = missing("dockerd", "docker.io")
		return x
	}
	if p.cli, err = exec.LookPath("docker"); err != nil {
		x.skip = missing("docker", "docker.io")
		return x
	}
	p.docker.dir = filepath.Join(p.dir, "docker")
	if err := p.startEngine(ctx, daemon); err != nil {
		x.skip = fmt.Sprintf("the engine did not start: %v", err)
		return x
	}
	x.version = version(daemon, "--version") + ", client " + version(p.cli, "--version")
	if err := p.importImage(ctx); err != nil {
		x.skip = fmt.Sprintf("the template's files could not be imported: %v", err)
		return x
	}
	l := p.limits()
	x.command = func(id string, argv []string) (*exec.Cmd, error) {
		args := []string{"run", "--name", id, "--user", strconv.Itoa(userID), "--workdir", p.tmpl.Workdir, "--memory", strconv.FormatInt(l.MemoryBytes, 10),
			"--cpus", strconv.FormatFloat(l.CPUs, 'g', -1, 64), "--pids-limit", strconv.Itoa(l.Pids)}
		for _, pair := range p.environment() {
			args = append(args, "--env", pair)
		}
		return p.command(append(append(args, image), argv...)...), nil
	}
	x.clear = func(id string) error { return p.tell("rm", "--force", id) }
	return x
}

// command is one of the client's.
func (d *docker) command(args ...string) *exec.Cmd {
	cmd := exec.Command(d.cli, args...)
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + d.dir, "DOCKER_HOST=unix://" + d.socket(), "DOCKER_CONFIG=" + filepath.Join(d.dir, "config"),
	}
	return cmd
}

// tell runs a command that says nothing worth hearing when it succeeds.
func (d *docker) tell(args ...string) error {
	out, err := d.command(args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("docker %s: %w: %s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}

func (d *docker) socket() string { return filepath.Join(d.dir, "socket") }

func (p *peers) startEngine(ctx context.Context, daemon string) error {
	d := &p.docker
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(d.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(daemon, "--data-root", filepath.Join(d.dir, "data"), "--exec-root", filepath.Join(d.dir, "exec"),
		"--pidfile", filepath.Join(d.dir, "pid"), "--host", "unix://"+d.socket(), "--oom-score-adjust", "0")
	cmd.Stdout, cmd.Stderr = log, log
	// A group of its own: an interrupt is for us, and we stop it in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setpgid: true}
	if err := p.stage.do(cmd.Start); err != nil {
		return err
	}
	d.daemon, d.ended = cmd.Process, make(chan struct{})
	go func() {
		defer close(d.ended)
		_ = cmd.Wait() // close waits for this; how it ended is in its log
	}()
	err = poll(ctx, time.Minute, 100*time.Millisecond, func() (bool, error) {
		select {
		case <-d.ended:
			return false, errors.New("it ended")
		default:
			return d.tell("version") == nil, nil
		}
	})
	if err != nil {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w: %s", err, lastLine(said))
	}
	return nil
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// importImage makes an image of the template's files.
func (p *peers) importImage(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := p.command("import", "-", image)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	// Read on the stage, where the files are.
	err = p.stage.do(func() error { return pack(in, p.root) })
	if err := errors.Join(err, in.Close(), cmd.Wait()); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}

// unpacked directories are left out of the image: development tools, documentation and applications of this host, which
// are gigabytes and which none of the jobs opens. How large an image is has no part in how fast it starts.
func unpacked(path string) bool {
	dir, name := filepath.Split(path)
	switch dir {
	case "usr/":
		return !(strings.HasPrefix(name, "lib") && name != "libexec") && name != "bin" && name != "sbin"
	case "usr/lib/":
		return !strings.Contains(name, "-linux-") && !strings.HasPrefix(name, "python3") && name != "locale" && name != "ssl"
	}
	return false
}

// pack writes a tree as an archive.
func pack(to io.Writer, root string) error {
	w := tar.NewWriter(to)
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		name, rerr := filepath.Rel(root, path)
		if err := errors.Join(err, rerr); err != nil || name == "." {
			return err
		}
		if e.IsDir() && unpacked(name) {
			return filepath.SkipDir
		}
		return packOne(w, path, name, e)
	})
	return errors.Join(err, w.Close())
}

func packOne(w *tar.Writer, path, name string, e fs.DirEntry) error {
	info, err := e.Info()
	if err != nil {
		return err
	}
	link := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return nil // a socket: no archive has them
	}
	header.Name = name
	if info.IsDir() {
		header.Name += "/"
	}
	if err := w.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

// close ends the engine, which ends its containers.
func (d *docker) close() error {
	if d.daemon == nil {
		return nil
	}
	_ = d.daemon.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-d.ended:
		return nil
	case <-time.After(30 * time.Second):
		_ = d.daemon.Kill()
		<-d.ended
		return errors.New("the docker engine had to be killed: look for containerd processes that it left")
	}
}

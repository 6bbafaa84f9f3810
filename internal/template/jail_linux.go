package template

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// try is Try, and hands the directory that holds what the command left in the user's home to keep.
func (t *Template) try(ctx context.Context, scratch string, argv []string, keep func(home string) error) ([]byte, error) {
	var out []byte
	var err error
	onThrowawayThread(func() { out, err = t.tryHere(ctx, scratch, argv, keep) })
	return out, err
}

// onThrowawayThread runs f on a thread that ends with it, and with the thread the namespaces f gave it and every
// mount in them. The process's first thread never ends, so f is kept away from it.
func onThrowawayThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			onThrowawayThread(f) // on another thread: this one is taken
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

func (t *Template) tryHere(ctx context.Context, scratch string, argv []string, keep func(string) error) ([]byte, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("new mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("cove-try", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return nil, fmt.Errorf("mount scratch: %w", err)
	}
	root := filepath.Join(scratch, "root")
	var upper string
	for i, tree := range t.Trees {
		dirs := make([]string, 2)
		for j, kind := range []string{"upper", "work"} {
			dirs[j] = filepath.Join(scratch, fmt.Sprintf("%s%d", kind, i))
			if err := os.Mkdir(dirs[j], 0o755); err != nil {
				return nil, err
			}
		}
		if i == 0 {
			upper = dirs[0]
			if err := tryHome(upper); err != nil {
				return nil, err
			}
			if err := os.Mkdir(root, 0o755); err != nil {
				return nil, err
			}
		}
		options := "userxattr,lowerdir=" + strings.Join(tree.Lower, ":") + ",upperdir=" + dirs[0] + ",workdir=" + dirs[1]
		if err := unix.Mount("overlay", root+tree.Target, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return nil, fmt.Errorf("mount %s: %w", tree.Target, err)
		}
	}
	for _, device := range []string{"null", "zero", "urandom"} {
		at := path.Join(root, "dev", device)
		if err := os.WriteFile(at, nil, 0o644); err != nil {
			return nil, err
		}
		if err := unix.Mount("/dev/"+device, at, "", unix.MS_BIND, ""); err != nil {
			return nil, fmt.Errorf("bind /dev/%s: %w", device, err)
		}
	}
	out, err := t.tryCommand(ctx, root, argv)
	if err != nil || keep == nil {
		return out, err
	}
	return out, keep(upper + userHome)
}

// tryHome gives nobody the user's home, so that what appears there can be told from the template.
func tryHome(upper string) error {
	if err := os.MkdirAll(upper+userHome, 0o755); err != nil {
		return err
	}
	return os.Chown(upper+userHome, nobodyID, nobodyID)
}

func (t *Template) tryCommand(ctx context.Context, root string, argv []string) ([]byte, error) {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = "/"
	both := &limitedWriter{&out, 1 << 20} // one and the same, so that exec makes one pipe and one goroutine writes
	cmd.Stdout, cmd.Stderr = both, both
	cmd.Env = []string{"HOME=" + userHome, fixedHashes}
	for key, value := range t.Env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     root,
		Credential: &syscall.Credential{Uid: nobodyID, Gid: nobodyID},
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return out.Bytes(), fmt.Errorf("%s: %w: %s", path.Base(argv[0]), err, lastLine(out.String(), "no output"))
	}
	return out.Bytes(), err
}

type limitedWriter struct {
	to   io.Writer
	left int
}

func (w *limitedWriter) Write(p []byte) (int, error) {
	n := min(len(p), w.left)
	w.left -= n
	if _, err := w.to.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

const (
	largestKept = 64 << 20
	mostKept    = 10000
)

// keepHome copies regular files and directories that appeared in home into the layer, as the user's.
func (l *layer) keepHome(home string) error {
	var bytes, count int64
	return filepath.WalkDir(home, func(at string, e fs.DirEntry, err error) error {
		if err != nil || at == home {
			return err
		}
		inside := userHome + strings.TrimPrefix(at, home)
		if count++; count > mostKept {
			return fmt.Errorf("more than %d files were left in the home directory", mostKept)
		}
		switch {
		case e.IsDir():
			return l.mkdir(inside)
		case !e.Type().IsRegular():
			return nil
		}
		f, err := os.OpenFile(at, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		content, err := io.ReadAll(io.LimitReader(f, largestKept-bytes+1))
		if err != nil {
			return err
		}
		if bytes += int64(len(content)); bytes > largestKept {
			return fmt.Errorf("more than %d MiB were left in the home directory", largestKept>>20)
		}
		return l.write(inside, content, 0o644)
	})
}

package maker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// mounts are what the owner of a sandbox wants to have in it beside its template's files. They are looked up anew for every
// shell: what the operator allows may have changed.
type mounts struct {
	tenant string
	asked  []sandbox.Mount
}

// newMounts takes a request's; nil: it has none. The server has checked them, and is not believed.
func newMounts(r wire.Start) (*mounts, error) {
	if len(r.Mounts) == 0 {
		return nil, nil
	}
	if err := sandbox.CheckMounts(r.Mounts); err != nil {
		return nil, err
	}
	return &mounts{r.Tenant, r.Mounts}, nil
}

// showMounts opens what a shell is to have, as mounts that are attached nowhere, and writes their places into its plan. The
// volumes among them are the shell's to leave, also after a failure.
func (m *Maker) showMounts(ctx context.Context, s *shell, t *template.Template, p *plan, userns *os.File) (files []*os.File, err error) {
	if s.form.mounts == nil {
		return nil, nil
	}
	for i, asked := range s.form.mounts.asked {
		var f *os.File
		switch asked.Kind {
		case sandbox.MountVolume:
			f, err = m.showVolume(ctx, s, asked, userns)
		case sandbox.MountData:
			f, err = m.showData(asked)
		case sandbox.MountHost:
			f, err = m.showHostPath(s, t, asked)
		default:
			err = fault.New(fault.Invalid, "unknown kind of mount %.40q", asked.Kind)
		}
		if err != nil {
			return files, err
		}
		files = append(files, f)
		copy(p.Mount[i][:maxTarget], asked.Target[1:])
		p.Mounts++
	}
	return files, nil
}

// badTarget explains why the mount of that number could not be put into its place.
func (p *plan) badTarget(number string, why error) error {
	i, err := strconv.Atoi(number)
	if err != nil || i < 0 || i >= maxMounts {
		return fmt.Errorf("mount %q: %w", number, why)
	}
	target := "/" + unix.ByteSliceToString(p.Mount[i][:])
	switch {
	case errors.Is(why, unix.ELOOP):
		return fault.Wrap(fault.Invalid, why, "nothing can be mounted at %s: a link lies on the way there; name the directory that it leads to", target)
	case errors.Is(why, unix.ENOTDIR):
		return fault.Wrap(fault.Invalid, why, "nothing can be mounted at %s: it is, or lies below, something else than a directory", target)
	}
	return fault.Wrap(fault.Invalid, why, "nothing can be mounted at %s: %v", target, why)
}

// account is somebody inside a sandbox.
type account struct {
	name     string
	home     string
	uid, gid int
}

// userID is the sandbox's ordinary user; templates are made with it.
const userID = 1000

// kernelAccount is who a template's kernels run as: a definition knows two, and the template made of a sandbox's files has
// those of the built one below, whoever it has for commands.
func kernelAccount(t *template.Template) account {
	name := t.Base().User
	if name == "root" {
		return account{name: name, home: "/root"}
	}
	return account{name, "/home/" + name, userID, userID}
}

// commandAccount is who commands run as, if that can be told from outside: the names of an image may be known inside only.
func commandAccount(t *template.Template) (account, bool) {
	base := t.Base()
	switch {
	case t.User == "root" || t.User == "":
		return account{name: "root"}, true
	case t.Image == nil:
		return account{name: t.User, uid: userID, gid: userID}, t.User == base.User
	case t.User == base.User && inSandbox(t.Image.UID) && inSandbox(t.Image.GID):
		return account{name: t.User, uid: t.Image.UID, gid: t.Image.GID}, true
	}
	user, group, both := strings.Cut(t.User, ":")
	uid, err := strconv.ParseUint(user, 10, 16)
	gid := uint64(0) // as the agent and other runtimes have it, for one without an account
	if both && err == nil {
		gid, err = strconv.ParseUint(group, 10, 16)
	}
	return account{name: t.User, uid: int(uid), gid: int(gid)}, err == nil
}

func inSandbox(id int) bool { return id >= 0 && id < idsPerSandbox }

// newUserns makes a user namespace in which nobody lives: what an idmapped mount says of ids.
func (m *Maker) newUserns(uids, gids string) (userns *os.File, err error) {
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, err
	}
	defer mine.Close()
	pid, pidfd, err := cloneApart(birthApart{
		birth: birth{program: m.host.shell, socket: theirs, stderr: debugStderr()}, mine: mine, uids: uids, gids: gids,
		seen: func(pid int) (err error) {
			userns, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
			return err
		},
	})
	theirs.Close()
	if err != nil {
		if userns != nil {
			userns.Close()
		}
		return nil, fmt.Errorf("map ids of a mount: %w", err)
	}
	_ = signal(pidfd, unix.SIGKILL)
	_, _ = waitExit(pid, pidfd)
	pidfd.Close()
	return userns, nil
}

// onThrowawayThread runs f on a thread that ends with it, and with the thread whatever namespace f has entered or made. The
// process's first thread never ends, so f is kept away from it.
func onThrowawayThread(f func() error) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			err = onThrowawayThread(f) // on another thread: this one is taken
			runtime.UnlockOSThread()
			return
		}
		err = f()
	}()
	<-done
	return err
}

// beneath opens a directory below another; no link on the way is followed, and none leads out.
func beneath(dir *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat2(int(dir.Fd()), path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// cloneDir copies the mount that a directory lies on, from that directory on and without what is mounted below it.
func cloneDir(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", dir.Name(), err)
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}

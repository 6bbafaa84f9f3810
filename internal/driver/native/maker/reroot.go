package maker

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// reroot gives a shell that nobody lives in yet the files of another sandbox: a pooled one then becomes a branch in a
// fraction of the time that a new one takes.
func (m *Maker) reroot(s *shell, t *template.Template, f form) (err error) {
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.pid))
	if err != nil {
		return err
	}
	defer userns.Close()
	made, mount, err := m.disks.make(f, len(t.Trees))
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	defer mount.Close()
	defer func() {
		if err != nil {
			made.close()
		}
	}()
	if err := setAttr(mount, 0, userns); err != nil {
		return err
	}
	p := &plan{Mode: modeReroot, Work: uint32(made.work)}
	if f.storage == sandbox.StorageVolatile {
		p.Volatile = 1
	}
	files, err := m.planTrees(p, t, made.below, userns)
	defer func() { wire.CloseAll(files) }()
	if err != nil {
		return err
	}
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return err
	}
	defer mine.Close()
	pid, pidfd, err := clone(birth{program: m.host.shell, socket: theirs, stderr: debugStderr()})
	theirs.Close()
	if err != nil {
		return err
	}
	defer pidfd.Close()
	err = order(mine, p, append(append([]*os.File{}, files...), mount, s.pidfd))
	if err != nil {
		_ = signal(pidfd, unix.SIGKILL)
	}
	_, waitErr := waitExit(pid, pidfd)
	if err == nil {
		err = waitErr
	}
	if err != nil {
		return fmt.Errorf("give a shell other files: %w", err)
	}
	if old := s.disk; old != nil {
		m.wg.Go(old.close) // nobody waits for that
	}
	s.disk, s.form = made, f
	return nil
}

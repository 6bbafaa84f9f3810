package agent

import (
	"path"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

func (a *Agent) symlink(params agentapi.SymlinkParams) (none struct{}, err error) {
	if params.Target == "" {
		return none, fault.New(fault.Invalid, "a link needs somewhere to lead to")
	}
	err = a.on(doer{params.User, params.Root}, params.Path, func(u user, p string) error {
		if params.Remove {
			return removeLink(p, params.Target)
		}
		owner := a.owner(u, params.Root)
		if err := makeDirs(path.Dir(p), 0o755, owner); err != nil {
			return err
		}
		return makeLink(p, params.Target, owner)
	})
	return none, err
}

func makeLink(p, target string, owner *user) error {
	dir, name, err := openParent(p)
	if err != nil {
		return err
	}
	defer syscall.Close(dir)
	err = symlinkat(target, dir, name)
	if err == syscall.EEXIST {
		if to, _ := readlinkat(dir, name); to == target {
			return nil
		}
	}
	if err != nil {
		return err
	}
	return give(dir, name, owner)
}

// removeLink removes a link that leads to target; what is not there is gone already, and what is not that link is somebody's.
func removeLink(p, target string) error {
	dir, name, err := openParent(p)
	if err == syscall.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer syscall.Close(dir)
	if to, err := readlinkat(dir, name); err != nil || to != target {
		return nil
	}
	if err := unlinkat(dir, name, 0); err != syscall.ENOENT {
		return err
	}
	return nil
}

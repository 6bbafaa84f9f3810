package agent

import (
	"errors"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// explain turns a system error into a fault with a sentence; what names the thing it happened to.
func explain(err error, what string) error {
	var f *fault.Error
	if err == nil || errors.As(err, &f) {
		return err
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return fault.Wrap(fault.Internal, err, "%s: %v", what, err)
	}
	kind, sentence := fault.Internal, errno.Error()
	switch errno {
	case syscall.ENOENT:
		kind, sentence = fault.NotFound, "no such file or directory"
	case syscall.ESRCH:
		kind, sentence = fault.NotFound, "no such process"
	case syscall.EACCES, syscall.EPERM:
		kind, sentence = fault.Denied, "permission denied"
	case syscall.EROFS:
		kind, sentence = fault.Denied, "the file system is read-only"
	case syscall.EISDIR:
		kind, sentence = fault.Invalid, "is a directory"
	case syscall.ENOTDIR:
		kind, sentence = fault.Invalid, "a part of the path is not a directory"
	case syscall.ELOOP:
		kind, sentence = fault.Invalid, agentapi.TooManyLinks
	case syscall.ENAMETOOLONG:
		kind, sentence = fault.Invalid, "the name is too long"
	case syscall.ENOEXEC:
		kind, sentence = fault.Invalid, "is not in a format that can be executed"
	case syscall.E2BIG:
		kind, sentence = fault.Invalid, "arguments and environment are too long: "+agentapi.ArgumentLimit
	case syscall.EINVAL, syscall.ENXIO, syscall.ENODEV, syscall.ENOTTY, syscall.EOPNOTSUPP:
		kind = fault.Invalid
	case syscall.EEXIST:
		kind, sentence = fault.Conflict, "already exists"
	case syscall.ENOTEMPTY:
		kind, sentence = fault.Conflict, "the directory is not empty"
	case syscall.EBUSY, syscall.ETXTBSY:
		kind, sentence = fault.Conflict, "is in use"
	case syscall.ENOSPC, syscall.EDQUOT:
		kind, sentence = fault.DiskFull, "the disk is full"
	case syscall.EFBIG:
		kind, sentence = fault.Exhausted, "the file would be too large"
	case syscall.EMFILE, syscall.ENFILE:
		kind, sentence = fault.Exhausted, "too many open files"
	case syscall.ENOMEM:
		kind, sentence = fault.Exhausted, "out of memory"
	case syscall.EAGAIN:
		kind, sentence = fault.Exhausted, "no more processes are allowed"
	case syscall.ECONNREFUSED:
		kind, sentence = fault.Unavailable, "nothing listens there"
	}
	return fault.Wrap(kind, err, "%s: %s", what, sentence)
}

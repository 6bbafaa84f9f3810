// Package fault names the kinds of failure a caller can act on, and knows nothing of who speaks to whom:
// each dialect has one table from these kinds to its own status codes.
package fault

import (
	"errors"
	"fmt"
)

// Kind says what a caller can do about a failure.
type Kind string

// The kinds. A switch over them is exhaustive.
const (
	Internal    Kind = "internal"    // our defect or the host's; nothing the caller can change
	Invalid     Kind = "invalid"     // the request itself is wrong
	Denied      Kind = "denied"      // the caller is known and may not
	Unauthed    Kind = "unauthed"    // the caller is not known
	NotFound    Kind = "not_found"   // no such thing, or it is somebody else's
	Conflict    Kind = "conflict"    // the thing is in a state that forbids this
	Exhausted   Kind = "exhausted"   // a limit or quota is reached
	DiskFull    Kind = "disk_full"   // a disk has no space: the sandbox's own, or the server's
	Timeout     Kind = "timeout"     // the time the caller gave has passed
	Unavailable Kind = "unavailable" // try again later
	Gone        Kind = "gone"        // it existed and has ended
	Unsupported Kind = "unsupported" // this server or driver cannot do that
)

// Kinds lists every kind, for tables that must be total.
var Kinds = []Kind{Internal, Invalid, Denied, Unauthed, NotFound, Conflict, Exhausted, DiskFull, Timeout, Unavailable, Gone, Unsupported}

// Error is a failure with a kind, a sentence for the caller and, for the operator, the chain below it.
type Error struct {
	Kind    Kind
	Message string
	Err     error
}

func (e *Error) Error() string {
	if e.Err == nil {
		return e.Message
	}
	return e.Message + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// New makes a failure of a kind with a sentence the caller can act on.
func New(kind Kind, format string, args ...any) error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Wrap gives a kind and a sentence to a cause; the cause is for the operator only.
func Wrap(kind Kind, cause error, format string, args ...any) error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...), Err: cause}
}

// KindOf is the kind of the outermost fault in err's chain, or Internal.
func KindOf(err error) Kind {
	var f *Error
	if errors.As(err, &f) {
		return f.Kind
	}
	return Internal
}

// Message is the sentence meant for the caller: never the chain below it.
func Message(err error) string {
	var f *Error
	if errors.As(err, &f) {
		return f.Message
	}
	return "internal error"
}

// Is reports whether err's outermost fault has this kind.
func Is(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }

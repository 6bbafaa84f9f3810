package client

import (
	"errors"
	"fmt"
)

// Kind says what a caller can do about a failure.
type Kind string

// The kinds.
const (
	Internal    Kind = "internal"    // the server's defect
	Invalid     Kind = "invalid"     // the request itself is wrong
	Denied      Kind = "denied"      // the key is known and may not
	Unauthed    Kind = "unauthed"    // the key is not known
	NotFound    Kind = "not_found"   // no such thing, or it is somebody else's
	Conflict    Kind = "conflict"    // the thing is in a state that forbids this
	Exhausted   Kind = "exhausted"   // a limit or quota is reached
	DiskFull    Kind = "disk_full"   // a disk has no space: the sandbox's own, or the server's
	Timeout     Kind = "timeout"     // the time given has passed
	Unavailable Kind = "unavailable" // try again later
	Gone        Kind = "gone"        // it existed and has ended
	Unsupported Kind = "unsupported" // this server cannot do that
)

// Error is a failure that the server explained.
type Error struct {
	Kind      Kind
	Message   string
	Status    int    // HTTP status; 0 when it came inside a stream
	RequestID string // names the request in the server's log
}

func (e *Error) Error() string {
	if e.Kind == Internal && e.RequestID != "" {
		return fmt.Sprintf("%s (request %s)", e.Message, e.RequestID)
	}
	return e.Message
}

// KindOf is the kind of the server's failure in err's chain, or empty when there is none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}

package tunnel

import (
	"encoding/binary"
	"errors"
	"net"
	"sync/atomic"
	"time"
)

// frames is a connection on which every frame of SPDY is one that a client sends. Whoever reads them trusts what they say: makes
// room for all of a frame before it has come, takes as many bytes of a ping as pings have, keeps a stream for as long as another
// calls it its parent, and begins a goroutine for each stream whose number is wrong.
type frames struct {
	net.Conn
	head [headLen + synLen]byte // of the next frame
	have int                    // bytes of head that have come
	left int                    // bytes of the frame's content that have not
	next uint32                 // the least number of the next stream

	since atomic.Int64 // when the last Read returned, in nanoseconds since 1970; 0 while one waits for the client
}

// unread is how long nobody has read.
func (f *frames) unread() time.Duration {
	since := f.since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(time.Unix(0, since))
}

// A head says what a frame is, flags, and its length in the last three bytes. A new stream goes on with its number and that of
// its parent.
const (
	headLen = 8
	synLen  = 8
)

// Kinds of frames that are no data, as the first four bytes say them; the version is not looked at.
const (
	control      = 1 << 31
	synStream    = 1
	synReply     = 2
	rstStream    = 3
	ping         = 6
	goAway       = 7
	headersFrame = 8
	windowUpdate = 9
)

var (
	errLength = errors.New("a frame has a length that it cannot have")
	errStream = errors.New("a stream has a number or a parent that it cannot have")
)

func (f *frames) Read(p []byte) (int, error) {
	f.since.Store(0)
	defer func() { f.since.Store(time.Now().UnixNano()) }()
	n, err := f.Conn.Read(p)
	for rest := p[:n]; len(rest) > 0; {
		if f.left > 0 {
			skip := min(f.left, len(rest))
			f.left, rest = f.left-skip, rest[skip:]
			continue
		}
		want := headLen
		if f.have >= headLen {
			want += synLen
		}
		took := copy(f.head[f.have:want], rest)
		f.have, rest = f.have+took, rest[took:]
		if f.have < want {
			break
		}
		if err := f.check(); err != nil {
			return 0, err
		}
	}
	return n, err
}

// check looks at a head that is there, or at the rest of that of a new stream.
func (f *frames) check() error {
	kind, length := binary.BigEndian.Uint32(f.head[:]), int(binary.BigEndian.Uint32(f.head[4:])&0xffffff)
	isSyn := kind&control != 0 && kind&0xffff == synStream
	switch {
	case !fits(kind, length):
		return errLength
	case !isSyn:
		f.have, f.left = 0, length
		return nil
	case f.have == headLen:
		return nil // the rest is still to come
	}
	number, parent := binary.BigEndian.Uint32(f.head[headLen:]), binary.BigEndian.Uint32(f.head[headLen+4:])
	if number < f.next || number >= control || parent != 0 {
		return errStream
	}
	f.have, f.left, f.next = 0, length-synLen, number+2
	return nil
}

// fits tells whether a frame may have a length.
func fits(kind uint32, length int) bool {
	if kind&control == 0 {
		return length <= maxFrame
	}
	switch kind & 0xffff {
	case synStream:
		return length >= 10 && length <= maxControl
	case synReply, headersFrame:
		return length >= 4 && length <= maxControl
	case ping:
		return length == 4
	case rstStream, goAway, windowUpdate:
		return length == 8
	}
	return false // settings, which no client sends, and what nobody knows
}

package agentapi

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// FrameKind says how to read a frame's payload.
type FrameKind uint8

// The kinds of frame. The same framing is spoken between server and agent and between agent and kernel.
const (
	FrameRequest FrameKind = iota + 1 // JSON Request; the first frame of a connection, client to agent
	FrameEvent                        // JSON Event, agent to client
	FrameStdout                       // raw bytes, agent to client
	FrameStderr                       // raw bytes, agent to client
	FrameStdin                        // raw bytes, client to agent
	FrameData                         // raw bytes of a file, either way
	FrameEOF                          // the sender has no more Stdin or Data; empty
	FrameControl                      // JSON Control, client to agent, while an operation runs
	FrameEnd                          // JSON End, agent to client; the last frame of an operation
	frameKinds
)

// HeaderSize is the length of a frame header: kind, three zero bytes, payload length in network order.
const HeaderSize = 8

// MaxPayload bounds one frame; whoever sends more is cut off.
const MaxPayload = 16 << 20

// ChunkSize is how much of a stream one frame carries.
const ChunkSize = 64 << 10

// Frame is one message on a connection.
type Frame struct {
	Kind    FrameKind
	Payload []byte
}

// ProtocolError is a peer that does not speak this protocol.
type ProtocolError struct{ Reason string }

func (e *ProtocolError) Error() string { return "agent protocol: " + e.Reason }

// PutHeader writes a frame header into b, which holds at least HeaderSize bytes.
func PutHeader(b []byte, kind FrameKind, length int) {
	b[0], b[1], b[2], b[3] = byte(kind), 0, 0, 0
	binary.BigEndian.PutUint32(b[4:8], uint32(length))
}

// ParseHeader reads a frame header and refuses what no peer of ours sends.
func ParseHeader(b []byte) (kind FrameKind, length int, err error) {
	kind = FrameKind(b[0])
	if kind == 0 || kind >= frameKinds || b[1]|b[2]|b[3] != 0 {
		return 0, 0, &ProtocolError{fmt.Sprintf("bad frame header % x", b[:4])}
	}
	n := binary.BigEndian.Uint32(b[4:8])
	if n > MaxPayload {
		return 0, 0, &ProtocolError{fmt.Sprintf("frame of %d bytes is over the limit of %d", n, MaxPayload)}
	}
	return kind, int(n), nil
}

// Reader reads frames. It reuses one buffer: a payload is valid until the next Read.
type Reader struct {
	r      io.Reader
	header [HeaderSize]byte
	buf    []byte
}

// NewReader reads frames from r, which should be buffered or a socket.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Read returns the next frame; io.EOF only between frames.
func (r *Reader) Read() (Frame, error) {
	if _, err := io.ReadFull(r.r, r.header[:]); err != nil {
		return Frame{}, err
	}
	kind, n, err := ParseHeader(r.header[:])
	if err != nil {
		return Frame{}, err
	}
	if cap(r.buf) < n {
		// Grow by what arrives, not by what a header claims.
		r.buf = make([]byte, 0, min(n, ChunkSize))
	}
	r.buf = r.buf[:0]
	for len(r.buf) < n {
		step := min(n-len(r.buf), ChunkSize)
		at := len(r.buf)
		if cap(r.buf)-at < step {
			grown := make([]byte, at, min(n, max(2*cap(r.buf), at+step)))
			copy(grown, r.buf)
			r.buf = grown
		}
		r.buf = r.buf[:at+step]
		if _, err := io.ReadFull(r.r, r.buf[at:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return Frame{}, err
		}
	}
	return Frame{Kind: kind, Payload: r.buf}, nil
}

// forget gives up a buffer that one large frame needed: the next one may come much later.
func (r *Reader) forget() {
	if cap(r.buf) > OutputSize {
		r.buf = nil
	}
}

// WriteFrame sends one frame with a single write, so that frames of several goroutines that share a lock never mix.
func WriteFrame(w io.Writer, kind FrameKind, payload []byte) error {
	if len(payload) > MaxPayload {
		return &ProtocolError{fmt.Sprintf("payload of %d bytes is over the limit of %d", len(payload), MaxPayload)}
	}
	b := make([]byte, HeaderSize+len(payload))
	PutHeader(b, kind, len(payload))
	copy(b[HeaderSize:], payload)
	_, err := w.Write(b)
	return err
}

// WriteJSON sends one value as a frame.
func WriteJSON(w io.Writer, kind FrameKind, value any) error {
	payload, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return WriteFrame(w, kind, payload)
}

package client

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// An interactive command is an HTTP/1.1 connection upgraded to Protocol. The client asks
//
//	GET /cove/v1/sandboxes/{id}/exec HTTP/1.1
//	Connection: Upgrade
//	Upgrade: cove-exec/1
//	X-API-Key: …
//
// and after "101 Switching Protocols" both sides exchange frames: one byte of kind, three zero bytes, four bytes of
// payload length in network order, payload. The client's first frame is FrameStart. The server's last frame is a
// FrameEvent with an end or a fault, after which it closes the connection. A client that closes early leaves:
// what then happens to the command is ExecRequest.OnDisconnect.

// Protocol is the name in the Upgrade header.
const Protocol = "cove-exec/1"

// FrameKind says how to read a frame's payload.
type FrameKind byte

// The kinds of frame.
const (
	FrameStart   FrameKind = 1 // client: JSON ExecRequest, once and first
	FrameStdin   FrameKind = 2 // client: raw bytes for the command's stdin
	FrameEOF     FrameKind = 3 // client: stdin ends; empty
	FrameControl FrameKind = 4 // client: JSON Control

	FrameEvent  FrameKind = 16 // server: JSON Event other than output
	FrameStdout FrameKind = 17 // server: raw bytes
	FrameStderr FrameKind = 18 // server: raw bytes
)

// MaxFrame bounds a frame's payload.
const MaxFrame = 1 << 20

const frameHeader = 8

// FrameReader reads frames; a payload is valid until the next Read.
type FrameReader struct {
	r      io.Reader
	header [frameHeader]byte
	buf    []byte
}

// NewFrameReader reads frames from r.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Read returns the next frame; io.EOF only between frames.
func (f *FrameReader) Read() (FrameKind, []byte, error) {
	if _, err := io.ReadFull(f.r, f.header[:]); err != nil {
		return 0, nil, err
	}
	kind := FrameKind(f.header[0])
	n := binary.BigEndian.Uint32(f.header[4:])
	if !kind.valid() || f.header[1]|f.header[2]|f.header[3] != 0 {
		return 0, nil, fmt.Errorf("bad frame header % x", f.header[:4])
	}
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("frame of %d bytes is over the limit of %d", n, MaxFrame)
	}
	if cap(f.buf) < int(n) {
		f.buf = make([]byte, n)
	}
	f.buf = f.buf[:n]
	if _, err := io.ReadFull(f.r, f.buf); err != nil {
		return 0, nil, fmt.Errorf("frame cut short: %w", io.ErrUnexpectedEOF)
	}
	return kind, f.buf, nil
}

func (k FrameKind) valid() bool {
	switch k {
	case FrameStart, FrameStdin, FrameEOF, FrameControl, FrameEvent, FrameStdout, FrameStderr:
		return true
	}
	return false
}

// WriteFrame sends one frame with a single write.
func WriteFrame(w io.Writer, kind FrameKind, payload []byte) error {
	if len(payload) > MaxFrame {
		return fmt.Errorf("frame of %d bytes is over the limit of %d", len(payload), MaxFrame)
	}
	b := make([]byte, frameHeader+len(payload))
	b[0] = byte(kind)
	binary.BigEndian.PutUint32(b[4:], uint32(len(payload)))
	copy(b[frameHeader:], payload)
	_, err := w.Write(b)
	return err
}

// WriteJSONFrame sends one value as a frame.
func WriteJSONFrame(w io.Writer, kind FrameKind, value any) error {
	payload, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return WriteFrame(w, kind, payload)
}

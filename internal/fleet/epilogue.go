package fleet

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
)

// lostServer is what the caller of a stream is told when the server that it comes from is gone.
const lostServer = "the server that ran this is gone; the sandbox lives on and another server takes it over: look at it and try again"

// LastWords gives what ends a stream in its own language when its server is gone; nil: the connection is cut instead.
type LastWords func(r *http.Request, mediaType, message string) []byte

// epilogue ends a stream that breaks off: with words that say why where there are any, and not in the middle of what was being said.
type epilogue struct {
	io.ReadCloser
	words []byte
	whole whole
	gone  func() bool // the server was given up: what it still says is no end
	over  bool
}

// whole follows a stream and tells whether it is between two messages.
type whole interface {
	saw([]byte)
	between() bool
}

func (f *Fleet) epilogue(resp *http.Response) io.ReadCloser {
	if resp.ContentLength >= 0 {
		return resp.Body
	}
	mediaType, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		return resp.Body
	}
	e := &epilogue{ReadCloser: resp.Body, whole: &lines{}, gone: func() bool { return errors.Is(context.Cause(resp.Request.Context()), errGone) }}
	switch mediaType {
	case "application/connect+json", "application/connect+proto":
		e.words, e.whole = connectEnd(lostServer), &envelopes{}
	default:
		if f.cfg.LastWords != nil {
			e.words = f.cfg.LastWords(resp.Request, mediaType, lostServer)
		}
	}
	if e.words == nil {
		return resp.Body
	}
	return e
}

func (e *epilogue) Read(p []byte) (int, error) {
	if e.over {
		n := copy(p, e.words)
		if e.words = e.words[n:]; len(e.words) == 0 {
			return n, io.EOF
		}
		return n, nil
	}
	n, err := e.ReadCloser.Read(p)
	e.whole.saw(p[:n])
	if err != nil && (!errors.Is(err, io.EOF) || e.gone()) && e.whole.between() {
		e.over, err = true, nil
	}
	return n, err
}

// lines are messages that end with a line.
type lines struct{ last byte }

func (l *lines) saw(b []byte) {
	if len(b) > 0 {
		l.last = b[len(b)-1]
	}
}

func (l *lines) between() bool { return l.last == 0 || l.last == '\n' }

// envelopes are messages of Connect: a byte of flags, the length as four bytes and the message.
type envelopes struct {
	head [5]byte
	have int    // bytes of head
	left uint32 // of the message
}

func (e *envelopes) saw(b []byte) {
	for len(b) > 0 {
		if e.left > 0 {
			n := min(uint64(e.left), uint64(len(b)))
			e.left -= uint32(n)
			b = b[n:]
			continue
		}
		n := copy(e.head[e.have:], b)
		e.have += n
		b = b[n:]
		if e.have == len(e.head) {
			e.have, e.left = 0, binary.BigEndian.Uint32(e.head[1:])
		}
	}
}

func (e *envelopes) between() bool { return e.have == 0 && e.left == 0 }

// connectEnd is the message that ends a stream of Connect with an error.
func connectEnd(message string) []byte {
	text, err := json.Marshal(map[string]any{"error": map[string]string{"code": "unavailable", "message": message}})
	if err != nil {
		return nil // texts can be encoded
	}
	return append(binary.BigEndian.AppendUint32([]byte{2}, uint32(len(text))), text...)
}

package cove

import (
	"encoding/base64"
	"encoding/json"
	"slices"
	"unicode/utf8"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
)

// encoder turns events into NDJSON lines. Output that is UTF-8 is text; a character that two chunks share is held back
// until it is whole, or until something other than output follows.
type encoder struct {
	held [2]partial // stdout, stderr
	join []byte
}

// partial is the beginning of a character.
type partial struct {
	bytes [utf8.UTFMax - 1]byte
	n     int
}

// append adds the lines for e to b; it may add none, when all of a chunk is held back.
func (c *encoder) append(b []byte, e *agentapi.Event) ([]byte, error) {
	switch e.Type {
	case agentapi.EventStdout:
		return c.output(b, 0, e.Data), nil
	case agentapi.EventStderr:
		return c.output(b, 1, e.Data), nil
	}
	b = c.release(b)
	line, err := json.Marshal(wireEvent(e))
	if err != nil {
		return b, err
	}
	return append(append(b, line...), '\n'), nil
}

// release gives out what is held back: no more bytes will make it whole.
func (c *encoder) release(b []byte) []byte {
	for i := range c.held {
		if h := &c.held[i]; h.n > 0 {
			b = appendOutput(b, i, h.bytes[:h.n])
			h.n = 0
		}
	}
	return b
}

func (c *encoder) output(b []byte, stream int, data []byte) []byte {
	h := &c.held[stream]
	if h.n > 0 {
		c.join = append(append(c.join[:0], h.bytes[:h.n]...), data...)
		data, h.n = c.join, 0
	}
	cut := len(data) - unfinished(data)
	h.n = copy(h.bytes[:], data[cut:])
	if cut == 0 {
		return b
	}
	return appendOutput(b, stream, data[:cut])
}

// unfinished is how many bytes at the end of data begin a character that more bytes could complete.
func unfinished(data []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(data)); n++ {
		tail := data[len(data)-n:]
		if !utf8.RuneStart(tail[0]) {
			continue
		}
		if utf8.FullRune(tail) {
			return 0
		}
		return n
	}
	return 0
}

func appendOutput(b []byte, stream int, data []byte) []byte {
	b = slices.Grow(b, len(data)+len(data)/4+64) // most text has few characters that need an escape
	b = append(b, `{"type":"`...)
	b = append(b, [...]string{"stdout", "stderr"}[stream]...)
	if utf8.Valid(data) {
		b = append(b, `","text":`...)
		b = appendString(b, data)
	} else {
		b = append(b, `","base64":"`...)
		b = base64.StdEncoding.AppendEncode(b, data)
		b = append(b, '"')
	}
	return append(b, '}', '\n')
}

const hex = "0123456789abcdef"

// appendString adds valid UTF-8 as a JSON string. encoding/json cannot append and would cost two copies of all output.
func appendString(b, s []byte) []byte {
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		ch := s[i]
		if ch >= 0x20 && ch != '"' && ch != '\\' && ch != 0x7f {
			continue
		}
		b = append(b, s[from:i]...)
		from = i + 1
		switch ch {
		case '"', '\\':
			b = append(b, '\\', ch)
		case '\n':
			b = append(b, '\\', 'n')
		case '\r':
			b = append(b, '\\', 'r')
		case '\t':
			b = append(b, '\\', 't')
		default:
			b = append(b, '\\', 'u', '0', '0', hex[ch>>4], hex[ch&15])
		}
	}
	return append(append(b, s[from:]...), '"')
}

// wireEvent is an event in the API's words; output is not its business.
func wireEvent(e *agentapi.Event) *client.Event {
	out := &client.Event{
		Type: client.EventType(e.Type), Time: e.Time, PID: e.PID, ID: e.ID, Count: e.Count, Message: e.Message,
		Result: (*client.Result)(e.Result), Error: (*client.CodeError)(e.Error),
	}
	if e.File != nil {
		out.File = &client.FileChange{Op: e.File.Op, Path: e.File.Path, IsDir: e.File.IsDir}
	}
	if e.End != nil {
		out.End = wireEnd(e.End)
	}
	return out
}

func wireEnd(e *agentapi.End) *client.End {
	return &client.End{
		Outcome: string(e.Outcome), ExitCode: e.ExitCode, Signal: e.Signal, Message: e.Message, Lost: e.Lost,
		Usage: client.RunUsage(e.Usage),
	}
}

package execd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"
)

// The pace of a stream.
const (
	keepalive   = 3 * time.Second       // clients know signs of life as often as that
	headerDelay = 20 * time.Millisecond // how long an answer's head may wait to travel with what comes first
)

// event is one thing that a stream tells.
type event struct {
	Type      string                     `json:"type"`
	Text      string                     `json:"text,omitempty"`
	Count     int                        `json:"execution_count,omitempty"`
	Took      int64                      `json:"execution_time,omitempty"` // milliseconds
	Timestamp int64                      `json:"timestamp"`                // milliseconds; clients pass over events without one
	Results   map[string]json.RawMessage `json:"results,omitempty"`
	Error     *eventError                `json:"error,omitempty"`
}

// eventError is why something failed. Clients discard all of it when the value is no string.
type eventError struct {
	Name      string   `json:"ename"`
	Value     string   `json:"evalue"`
	Traceback []string `json:"traceback"`
}

// took is a duration in whole milliseconds, of which everything that ran has at least one.
func took(d time.Duration) int64 { return max(1, (d + time.Millisecond - 1).Milliseconds()) }

// stream is an answer that consists of events, each a line of JSON and a blank one. It begins with its first event, so that
// what fails before can have a status of its own.
type stream struct {
	w     http.ResponseWriter
	to    *http.ResponseController
	begun bool
	buf   bytes.Buffer
	enc   *json.Encoder
	line  bytes.Buffer // of enc
	held  int          // bytes in buf that can wait
}

func newStream(w http.ResponseWriter) *stream {
	s := &stream{w: w, to: http.NewResponseController(w)}
	s.enc = json.NewEncoder(&s.line)
	s.enc.SetEscapeHTML(false)
	return s
}

// nextLine is U+0085, at which some clients cut lines, and how JSON can say it without.
var nextLine, nextLineEscaped = []byte("\u0085"), []byte(`\u0085`)

// add puts an event behind those that wait to be sent.
func (s *stream) add(e event) {
	if e.Timestamp == 0 {
		e.Timestamp = time.Now().UnixMilli()
	}
	s.line.Reset()
	if err := s.enc.Encode(e); err != nil { // a kernel's JSON was read once already
		return
	}
	line := s.line.Bytes()
	if bytes.Contains(line, nextLine) {
		line = bytes.ReplaceAll(line, nextLine, nextLineEscaped)
	}
	s.buf.Write(line)
	s.buf.WriteByte('\n')
}

// flush sends what waits.
func (s *stream) flush() error {
	s.begin()
	_, err := s.w.Write(s.buf.Bytes())
	s.buf.Reset()
	s.held = 0
	if s.buf.Cap() > maxLine {
		s.buf = bytes.Buffer{} // what a large result took is not kept
	}
	if err != nil {
		return err
	}
	return s.to.Flush()
}

// idle sends what has waited, or a sign of life.
func (s *stream) idle() error {
	if s.begun && s.buf.Len() == 0 {
		s.add(event{Type: "ping", Text: "pong"})
	}
	return s.flush()
}

// patience is how long nothing may be sent.
func (s *stream) patience() time.Duration {
	if !s.begun || s.buf.Len() > 0 {
		return headerDelay
	}
	return keepalive
}

func (s *stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	out := s.w.Header()
	out.Set("Content-Type", "text/event-stream")
	out.Set("Cache-Control", "no-cache")
	out.Set("X-Accel-Buffering", "no")
	out.Set("X-Content-Type-Options", "nosniff")
	s.w.WriteHeader(http.StatusOK)
}

// init adds the first event, which waits a moment to travel with what comes next.
func (s *stream) init(id string) {
	s.add(event{Type: "init", Text: id})
	s.held = s.buf.Len()
}

// ready tells whether there is more to send than what can wait.
func (s *stream) ready() bool { return s.buf.Len() > s.held }

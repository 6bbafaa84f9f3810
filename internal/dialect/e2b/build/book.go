package build

import (
	"strings"
	"sync"
	"time"
)

// What the log of one build holds: beyond it, output of commands is left out, and what we say ourselves is not.
const (
	maxLines    = 20_000
	maxLogBytes = 4 << 20
	maxLine     = 4 << 10
	keptBytes   = 64 << 10 // of the log that stays when the build is not recent any more
)

// level is how much a line matters.
type level string

// The levels, in order.
const (
	levelDebug level = "debug"
	levelInfo  level = "info"
	levelWarn  level = "warn"
	levelError level = "error"
)

var levels = []level{levelDebug, levelInfo, levelWarn, levelError}

// line is one entry of a build's log.
type line struct {
	Time    time.Time `json:"timestamp"`
	Message string    `json:"message"`
	Level   level     `json:"level"`
	Step    string    `json:"step,omitempty"`
}

// book is the log of a build. Lines are only added, so that a place in it stays the same place.
type book struct {
	mu    sync.Mutex
	lines []line
	bytes int
	full  bool
}

// say adds a line of our own.
func (b *book) say(l level, step, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(line{now(), tidy(message), l, step})
}

// output adds a line that a command wrote.
func (b *book) output(step, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.full {
		return
	}
	if len(b.lines) >= maxLines || b.bytes >= maxLogBytes {
		b.full = true
		b.add(line{now(), "the log is full: further output of commands is left out", levelWarn, step})
		return
	}
	b.add(line{now(), tidy(message), levelInfo, step})
}

func (b *book) add(l line) {
	b.lines = append(b.lines, l)
	b.bytes += len(l.Message)
}

func (b *book) all() []line {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lines[:len(b.lines):len(b.lines)]
}

// took is how long it has been since the first line.
func (b *book) took() string {
	all := b.all()
	if len(all) == 0 {
		return "no time"
	}
	return time.Since(all[0].Time).Round(time.Millisecond).String()
}

// tail is the end of the log, for a document.
func (b *book) tail() []line {
	all := b.all()
	n, from := 0, len(all)
	for from > 0 && n < keptBytes {
		from--
		n += len(all[from].Message) + 64
	}
	return all[from:]
}

// tidy makes a line of text of whatever a command wrote.
func tidy(s string) string {
	if len(s) > maxLine {
		s = s[:maxLine] + "…"
	}
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", ""), "\uFFFD")
}

// splitter makes lines of the pieces in which a stream arrives.
type splitter struct {
	part []byte
	line func(string)
}

func (s *splitter) write(p []byte) {
	for _, c := range p {
		switch {
		case c == '\n':
			s.flush()
		case len(s.part) <= maxLine: // of a longer one the rest is left out
			s.part = append(s.part, c)
		}
	}
}

// flush tells the last line, which may have no end.
func (s *splitter) flush() {
	text := strings.TrimRight(string(s.part), "\r")
	if i := strings.LastIndexByte(text, '\r'); i >= 0 { // a progress bar: what a terminal would show in the end
		text = text[i+1:]
	}
	if text != "" {
		s.line(text)
	}
	s.part = s.part[:0]
}

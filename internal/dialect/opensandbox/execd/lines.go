package execd

import (
	"bytes"
	"unicode/utf8"
)

// maxLine is how long a line may become before it is told in pieces: clients bound what they read at once.
const maxLine = 256 << 10

// lines cuts output into lines as it comes. Each ends with \n, \r or both; a line that never ends is told at the end.
type lines struct {
	raw     bool   // a line is told with what ended it
	rest    []byte // of a line that has not ended
	skip    bool   // the last byte was \r: an \n that follows belongs to it
	owed    bool   // and nothing was told of that line, which is blank if an \n follows
	emitted bool   // a part of the line in rest was told before
}

// next takes a chunk and gives its lines to tell.
func (l *lines) next(chunk []byte, tell func(string)) {
	for len(chunk) > 0 {
		if l.skip && chunk[0] == '\n' {
			if l.owed || l.raw {
				tell("\n")
			}
			chunk, l.skip = chunk[1:], false
			continue
		}
		l.skip = false
		at := bytes.IndexAny(chunk, "\n\r")
		if at < 0 {
			l.keep(chunk, tell)
			return
		}
		l.keep(chunk[:at], tell)
		end := chunk[at : at+1]
		if bytes.HasPrefix(chunk[at:], []byte("\r\n")) {
			end = chunk[at : at+2]
		}
		l.over(end, tell)
		chunk = chunk[at+len(end):]
	}
}

// over tells a line that has ended. Without its end a blank one is "\n", and a \r with nothing before it says nothing.
func (l *lines) over(end []byte, tell func(string)) {
	blank := len(l.rest) == 0 && !l.emitted
	switch {
	case l.raw:
		tell(string(append(l.rest, end...)))
	case len(l.rest) > 0:
		tell(string(l.rest))
	case blank && end[len(end)-1] == '\n':
		tell("\n")
	}
	l.skip, l.owed = string(end) == "\r", blank
	l.rest, l.emitted = l.rest[:0], false
}

// keep adds to the line; what is too long is told as far as its characters are whole.
func (l *lines) keep(part []byte, tell func(string)) {
	for len(l.rest)+len(part) > maxLine {
		n := maxLine - len(l.rest)
		l.rest = append(l.rest, part[:n]...)
		part = part[n:]
		cut := len(l.rest) - unfinished(l.rest)
		tell(string(l.rest[:cut]))
		l.rest = append(l.rest[:0], l.rest[cut:]...)
		l.emitted = true
	}
	l.rest = append(l.rest, part...)
}

// end tells what is left.
func (l *lines) end(tell func(string)) {
	if len(l.rest) > 0 {
		tell(string(l.rest))
	}
	l.rest = nil
}

// unfinished is how many bytes at the end begin a character that may still become whole.
func unfinished(data []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(data)); n++ {
		if c := data[len(data)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(data[len(data)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

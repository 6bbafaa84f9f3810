package cli

import (
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"
)

const (
	patience = time.Second            // what takes less needs no progress
	frame    = 120 * time.Millisecond // of the spinner
	reminder = 10 * time.Second       // between two plain lines
)

var spinner = []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")

// working tells on standard error what goes on and for how long, once that takes more than a second: on a terminal in
// one line that is gone at the end, elsewhere in plain lines. The caller calls done before it writes anything else.
func (a *invocation) working(what func() string) (done func()) {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		a.tellProgress(what, stop)
	}()
	return func() {
		close(stop)
		<-ended
	}
}

func (a *invocation) tellProgress(what func() string, stop <-chan struct{}) {
	begun := time.Now()
	select {
	case <-stop:
		return
	case <-time.After(patience):
	}
	f, live := terminal(a.Err)
	every := reminder
	if live {
		every = frame
		defer fmt.Fprint(a.Err, eraseLine)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for i := 0; ; i++ {
		line := fmt.Sprintf("%s (%s)", what(), short(time.Since(begun)))
		if live {
			line = string(spinner[i%len(spinner)]) + " " + line
			fmt.Fprint(a.Err, eraseLine+cut(line, int(terminalSize(f).Cols)-1))
		} else {
			fmt.Fprintln(a.Err, line)
		}
		select {
		case <-stop:
			return
		case <-tick.C:
		}
	}
}

const eraseLine = "\r\x1b[K"

// still is a progress that has no parts.
func still(format string, args ...any) func() string {
	return func() string { return fmt.Sprintf(format, args...) }
}

// meter counts what is read through it, or written to it.
type meter struct {
	io.Reader
	done  atomic.Int64
	total int64 // zero: not known
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.done.Add(int64(n))
	return n, err
}

func (m *meter) Write(p []byte) (int, error) {
	m.done.Add(int64(len(p)))
	return len(p), nil
}

// progress says how far a copy is.
func (m *meter) progress(what string) func() string {
	return func() string {
		done := m.done.Load()
		if m.total <= 0 {
			return what + " " + size(done)
		}
		return fmt.Sprintf("%s %s %s of %s", what, bar(done, m.total), size(done), size(m.total))
	}
}

// bar shows how far something is that counts what it does.
func bar(done, total int64) string {
	const width = 20
	if total <= 0 {
		return ""
	}
	full := int(min(done, total) * width / total)
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", width-full) + "]"
}

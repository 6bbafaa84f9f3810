package cli

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/covehq/cove/client"
)

// screen is lines of a terminal that are written again and again in the same place.
type screen struct {
	f     *os.File
	whole bool // it has the terminal for itself, and what was there before comes back at its end
	lines int  // how many are there now
	last  client.PTYSize
}

const (
	hideCursor = "\x1b[?25l"
	showCursor = "\x1b[?25h"
	enterWhole = "\x1b[?1049h"
	leaveWhole = "\x1b[?1049l"
	home       = "\x1b[H"
	eraseRight = "\x1b[K"
	eraseBelow = "\x1b[J"
	eraseAll   = "\x1b[2J"
)

// openScreen takes the place below the cursor, or the whole terminal.
func openScreen(f *os.File, whole bool) *screen {
	if whole {
		fmt.Fprint(f, enterWhole)
	}
	fmt.Fprint(f, hideCursor)
	return &screen{f: f, whole: whole}
}

func (s *screen) close() {
	if s.whole {
		fmt.Fprint(s.f, leaveWhole)
	}
	fmt.Fprint(s.f, showCursor)
}

// draw replaces what is there. render gets the size there is; lines below it are left out. A terminal that was resized has
// moved the old lines, so all of it is erased.
func (s *screen) draw(render func(size client.PTYSize) []string) {
	size := terminalSize(s.f)
	lines := render(size)
	if most := int(size.Rows) - 1; len(lines) > most && most > 1 {
		lines = append(lines[:most-1:most-1], fmt.Sprintf("… and %d more lines; make the window higher", len(lines)-most+1))
	}
	var b strings.Builder
	switch {
	case s.lines > 0 && size != s.last:
		b.WriteString(home + eraseAll)
	case s.whole:
		b.WriteString(home)
	case s.lines > 0:
		fmt.Fprintf(&b, "\x1b[%dA\r", s.lines)
	}
	for _, line := range lines {
		b.WriteString(line + eraseRight + "\r\n") // a raw terminal needs both
	}
	b.WriteString(eraseBelow)
	fmt.Fprint(s.f, b.String())
	s.lines, s.last = len(lines), size
}

// keys are what is typed on a terminal while a screen is shown; nothing where there is no keyboard. Restore it.
func (a *invocation) keys() (typed <-chan byte, restore func()) {
	f, ok := terminal(a.In)
	if !ok {
		return nil, func() {}
	}
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, func() {}
	}
	keys := make(chan byte)
	// A read from a terminal cannot be called off: the process ends, and the goroutine with it.
	go func() {
		b := make([]byte, 1)
		for {
			if n, err := f.Read(b); n == 0 || err != nil {
				return
			}
			keys <- b[0]
		}
	}()
	return keys, func() { _ = term.Restore(int(f.Fd()), state) }
}

package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// table is text in columns, which are as wide as their widest cell in runes. The last cell of a row widens nothing.
type table struct {
	right []bool // by column
	rows  [][]cell
}

// cell is a text and how it looks on a terminal.
type cell struct {
	text  string
	style style
}

// style is what goes between ESC [ and m; empty is plain.
type style string

const (
	bold   style = "1"
	dim    style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	cyan   style = "36"
)

// head names the columns; what is under a name that begins with > is aligned to the right.
func (t *table) head(names ...string) {
	cells := make([]cell, len(names))
	for i, name := range names {
		name, right := strings.CutPrefix(name, ">")
		cells[i], t.right = cell{name, bold}, append(t.right, right)
	}
	t.rows = append(t.rows, cells)
}

// row adds a line; texts may be anybody's.
func (t *table) row(values ...any) {
	cells := make([]cell, len(values))
	for i, v := range values {
		c, ok := v.(cell)
		if !ok {
			c.text = fmt.Sprint(v)
		}
		c.text = clean(c.text)
		cells[i] = c
	}
	t.rows = append(t.rows, cells)
}

// lines are the rows as text, no wider than width unless that is zero.
func (t *table) lines(width int, colour bool) []string {
	var widths []int
	for _, row := range t.rows {
		for i, c := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			if i < len(row)-1 || t.isRight(i) {
				widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
			}
		}
	}
	all := make([]string, 0, len(t.rows))
	for _, row := range t.rows {
		all = append(all, t.line(row, widths, width, colour))
	}
	return all
}

const gap = 2 // between two columns

func (t *table) isRight(i int) bool { return i < len(t.right) && t.right[i] }

func (t *table) line(row []cell, widths []int, width int, colour bool) string {
	var b strings.Builder
	at := 0 // runes so far
	for i, c := range row {
		pad := max(widths[i]-utf8.RuneCountInString(c.text), 0)
		before, after := 0, pad+gap
		if t.isRight(i) {
			before, after = pad, gap
		}
		if i == len(row)-1 {
			after = 0
		}
		text := c.text
		if width > 0 {
			text = cut(text, width-at-before)
		}
		b.WriteString(strings.Repeat(" ", before) + paint(text, c.style, colour) + strings.Repeat(" ", after))
		at += before + utf8.RuneCountInString(text) + after
		if width > 0 && at >= width {
			break
		}
	}
	return strings.TrimRight(b.String(), " ")
}

// cut is the text in at most n runes.
func cut(text string, n int) string {
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	if n <= 1 {
		return ""
	}
	return string([]rune(text)[:n-1]) + "…"
}

func paint(text string, s style, colour bool) string {
	if !colour || s == "" || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}

// stateStyles are the colours of a sandbox's states.
var stateStyles = map[string]style{"running": green, "paused": yellow, "starting": cyan, "stopping": cyan, "ended": dim}

func stateCell(state string) cell { return cell{state, stateStyles[state]} }

// terminal is the terminal behind a stream, if there is one.
func terminal(stream any) (*os.File, bool) {
	f, ok := stream.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}

// inColour reports whether colours are welcome on a stream: see https://no-color.org.
func inColour(w io.Writer) bool {
	_, ok := terminal(w)
	return ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// show writes a table as wide as it is: what is too long for the terminal wraps, and nothing is lost.
func (t *table) show(w io.Writer) error {
	var b strings.Builder
	for _, line := range t.lines(0, inColour(w)) {
		b.WriteString(line + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

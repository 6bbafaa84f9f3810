package cli

import (
	"io"

	"github.com/spf13/cobra"
)

// Root is the whole tree of commands.
func Root() *cobra.Command { return (&invocation{}).root() }

// What tests look at from outside.
var (
	Ago   = ago
	Short = short
	Size  = size
	Pump  = pump
	Keys  = parseKeys
)

// Lines are rows as a table shows them.
func Lines(width int, head []string, rows ...[]any) []string {
	var t table
	t.head(head...)
	for _, r := range rows {
		t.row(r...)
	}
	return t.lines(width, false)
}

// Working shows progress on w.
func Working(w io.Writer, what func() string) (done func()) {
	return (&invocation{Streams: Streams{Err: w}}).working(what)
}

package cli

import (
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
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

// What is told about images and mounts.
var (
	Familiar  = familiar
	Quoted    = quoted
	Mounts    = mounts
	PlainPull = plainPull
	NameOf    = nameOf
)

// PullLines is a pull on a terminal after some events.
func PullLines(what string, width int, events ...client.PullEvent) []string {
	p := &pullProgress{a: &invocation{}, what: what, begun: time.Now(), f: os.Stderr, layers: map[string]client.PullEvent{}}
	for _, e := range events {
		p.add(e)
	}
	return p.lines(width)
}

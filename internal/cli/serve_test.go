package cli_test

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/cli"
)

// A key that is printed to a pipe or a file stays in a log.
func TestServe_AdminKeyOnATerminalOnly(t *testing.T) {
	const last = "JavaScript" // far below the key
	serve := func(t *testing.T, ctx context.Context, dir string, out *os.File) (ended chan int) {
		ended = make(chan int, 1)
		args := []string{"serve", "--driver", "inproc", "--listen", "127.0.0.1:0", "--data-dir", dir, "--log-level", "error"}
		go func() { ended <- cli.Main(ctx, args, cli.Streams{In: os.Stdin, Out: out, Err: io.Discard}) }()
		return ended
	}
	for name, run := range map[string]func(t *testing.T, dir string) (said string){
		"terminal": func(t *testing.T, dir string) string {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			console := openTerminal(t)
			ended := serve(t, ctx, dir, console.tty)
			said := console.await(t, last)
			stop()
			<-ended
			return said
		},
		"pipe": func(t *testing.T, dir string) string {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			reader, writer, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer reader.Close()
			ended := serve(t, ctx, dir, writer)
			var said strings.Builder
			for buffer := make([]byte, 4096); !strings.Contains(said.String(), last); {
				n, err := reader.Read(buffer)
				if err != nil {
					t.Fatalf("%v after %q", err, said.String())
				}
				said.Write(buffer[:n])
			}
			stop()
			<-ended
			writer.Close()
			return said.String()
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			said := run(t, dir)
			key, err := app.LocalKey(dir)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(said, key) != (name == "terminal") || !strings.Contains(said, "server/api_key") {
				t.Errorf("it says:\n%s", said)
			}
		})
	}
}

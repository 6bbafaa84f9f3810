// Command cove is the server and its command line in one binary.
package main

import (
	"context"
	"os"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/cli"
)

func main() {
	if status, ok := app.Internal(os.Args[1:], os.Stdin, os.Stdout, os.Stderr); ok {
		os.Exit(status)
	}
	os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}))
}

// Command ensure builds templates into a directory, for work on drivers before there is a CLI:
//
//	go run ./internal/template/ensure -dir DIR base python
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"github.com/covehq/cove/internal/template"
)

func main() {
	dir := flag.String("dir", "", "the templates directory")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *dir, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir string, names []string) error {
	store, err := template.Open(template.Options{Dir: dir})
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	for _, name := range names {
		t, err := store.Ensure(ctx, name, func(p template.Progress) {
			fmt.Fprintf(os.Stderr, "%s: %s %d/%d %s\n", name, p.Step, p.Done, p.Total, p.Message)
		})
		if err != nil {
			return err
		}
		if err := out.Encode(t); err != nil {
			return err
		}
	}
	return nil
}

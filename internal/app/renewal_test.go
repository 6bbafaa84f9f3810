package app_test

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/template"
)

// TestRenewal_DamagedTemplates checks every built template, also those that the server does not prepare.
func TestRenewal_DamagedTemplates(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
	dir := t.TempDir()
	for name, definition := range map[string]string{
		"prepared": "[files]\n'/etc/prepared' = 'whole'",
		"above":    "from = 'prepared'\n[files]\n'/etc/above' = 'whole'",
		"apart":    "[files]\n'/etc/apart' = 'whole'",
		"old":      "[files]\n'/etc/old' = 'whole'",
		"unbuilt":  "",
	} {
		text := "name = '" + name + "'\n" + definition + "\n"
		if err := os.WriteFile(filepath.Join(dir, name+".toml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	open := func() *template.Store {
		t.Helper()
		store, err := template.Open(template.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
	for _, name := range []string{"above", "apart", "old", "prepared"} {
		if _, err := open().Ensure(t.Context(), name, nil); err != nil {
			t.Fatal(err)
		}
	}
	// A template that nothing but its definition has outdated is not this server's to build.
	if err := os.WriteFile(filepath.Join(dir, "old.toml"), []byte("name = 'old'\n[files]\n'/etc/old' = 'new'"), 0o644); err != nil {
		t.Fatal(err)
	}
	fileOf := func(name string) string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(dir, "built/layers", name+"-*", "trees/@/etc", name))
		if err != nil || len(found) != 1 {
			t.Fatalf("the file of %s: %q, %v", name, found, err)
		}
		return found[0]
	}
	// renew has the server tell the child something after some of its lines.
	renew := func(orders map[string]string) (said []string) {
		t.Helper()
		stdin, server := io.Pipe()
		child, stdout := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			err := app.RenewMain([]string{dir, "prepared"}, stdin, stdout)
			ended <- errors.Join(err, stdout.Close())
		}()
		for lines := json.NewDecoder(child); ; {
			var line struct{ Template, State string }
			if err := lines.Decode(&line); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			heard := line.Template + " " + line.State
			said = append(said, heard)
			if order := orders[heard]; order != "" {
				if _, err := io.WriteString(server, order); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		return said
	}
	finish := map[string]string{" checked": "finish\n"}
	if got, want := renew(finish), []string{" checked", "prepared current"}; !slices.Equal(got, want) {
		t.Errorf("with nothing damaged: %q, want %q", got, want)
	}
	for damaged, want := range map[string][]string{
		"apart": {" checked", "apart damaged", "apart building", "apart built", "prepared current"},
		// They share a layer, so both get another digest.
		"prepared": {"prepared damaged", " checked", "above damaged", "prepared building", "prepared built", "above built"},
	} {
		if err := os.Remove(fileOf(damaged)); err != nil {
			t.Fatal(err)
		}
		if got := renew(finish); !slices.Equal(got, want) {
			t.Errorf("%s is damaged: %q, want %q", damaged, got, want)
		}
		if text, err := os.ReadFile(fileOf(damaged)); err != nil || string(text) != "whole" {
			t.Errorf("%s was built again and its file holds %q, %v", damaged, text, err)
		}
	}

	// What the server finds damaged, the child builds again: content that has the same size, and a
	// template that does not work although it is as it was built.
	if err := os.WriteFile(fileOf("apart"), []byte("empty"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := []string{" checked", "prepared current", "apart building", "apart built", "prepared building", "prepared built", "apart failed", "nowhere failed"}
	orders := map[string]string{
		"prepared current": "rebuild apart\n",
		"apart built":      "rebuild prepared\n",
		"prepared built":   "rebuild apart\n",
		"apart failed":     "rebuild nowhere\n",
		"nowhere failed":   "finish\n",
	}
	if got := renew(orders); !slices.Equal(got, want) {
		t.Errorf("the server wants templates built again: %q, want %q", got, want)
	}
	if text, err := os.ReadFile(fileOf("apart")); err != nil || string(text) != "whole" {
		t.Errorf("a file that was changed holds %q, %v", text, err)
	}
}

package template_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/covehq/cove/internal/template"
)

func TestWhatAnotherProcessDefinesIsSeenAndWhatItSpoilsIsNot(t *testing.T) {
	dir := write(t, map[string]string{"one.toml": "name = 'one'"})
	store := open(t, dir)
	has := func(name string) bool {
		store.Current()
		return slices.ContainsFunc(store.List(), func(i template.Info) bool { return i.Name == name })
	}
	change := func(name, text string, at time.Time) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		// So that no clock is too coarse to tell.
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
	}
	if !has("one") || has("two") {
		t.Fatal("at first")
	}
	change("two.toml", "name = 'two'", time.Now().Add(time.Second))
	if !has("two") {
		t.Error("a new definition is not seen")
	}
	change("three.toml", "name = 3", time.Now().Add(2*time.Second))
	if has("three") || !has("two") {
		t.Error("a broken definition takes others with it")
	}
}

package image_test

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// What a create from an image that is here costs before the driver is asked.
func BenchmarkEnsureKnown(b *testing.B) {
	store, err := sqlstore.Open(filepath.Join(b.TempDir(), "cove.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	driver := newFakeImager()
	s, err := image.Open(image.Config{Dir: b.TempDir(), Operator: acme}, driver, driver, store, discard)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Import(b.Context(), acme, "small:v1", bytes.NewReader(make([]byte, 1024)), nil); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Ensure(b.Context(), acme, template.PullRequest{Reference: "small:v1"}); err != nil {
			b.Fatal(err)
		}
	}
}

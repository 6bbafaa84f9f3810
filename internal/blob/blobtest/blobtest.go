// Package blobtest is the contract of whoever keeps blobs, as tests.
package blobtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
)

// Run tests stores that open makes, each empty.
func Run(t *testing.T, open func(t *testing.T) artifact.Blobs) {
	for name, test := range map[string]func(*testing.T, artifact.Blobs){
		"a blob is found under its digest":                found,
		"a draft that was dropped leaves nothing":         dropped,
		"the same bytes are one blob":                     once,
		"tenants share nothing":                           apart,
		"names of tenants lead nowhere else":              names,
		"what is no digest is refused":                    refused,
		"a blob that is read can be replaced and removed": busy,
		"many may write the same at once":                 together,
		"a mark stays until the blob is another":          marks,
		"what was placed can be forced to the disk":       synced,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func put(t *testing.T, b artifact.Blobs, tenant, content string) (existed bool) {
	t.Helper()
	d, err := b.Draft(tenant)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drop()
	if _, err := io.Copy(struct{ io.Writer }{d}, strings.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	if d.Sum() != sum(content) || d.Size() != int64(len(content)) {
		t.Errorf("the draft is %s of %d bytes", d.Sum(), d.Size())
	}
	existed, err = d.Place()
	if err != nil {
		t.Fatal(err)
	}
	return existed
}

func get(t *testing.T, b artifact.Blobs, tenant, content string) (string, error) {
	t.Helper()
	r, err := b.Open(tenant, sum(content))
	if err != nil {
		return "", err
	}
	defer r.Close()
	all, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(all), nil
}

func all(t *testing.T, b artifact.Blobs) (refs []artifact.Ref) {
	t.Helper()
	for r, err := range b.All() {
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, r)
	}
	slices.SortFunc(refs, func(x, y artifact.Ref) int { return strings.Compare(x.Tenant+x.SHA256, y.Tenant+y.SHA256) })
	return refs
}

func found(t *testing.T, b artifact.Blobs) {
	for _, content := range []string{"hello", "", strings.Repeat("x", 1<<20)} {
		put(t, b, "acme", content)
		if got, err := get(t, b, "acme", content); err != nil || got != content {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	if _, err := get(t, b, "acme", "never"); !fault.Is(err, fault.Gone) {
		t.Error("one that is not there:", err)
	}
	if err := b.Remove("acme", sum("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t, b, "acme", "hello"); !fault.Is(err, fault.Gone) {
		t.Error("one that was removed:", err)
	}
	if err := b.Remove("acme", sum("hello")); err != nil {
		t.Error("removed twice:", err)
	}
}

func dropped(t *testing.T, b artifact.Blobs) {
	d, err := b.Draft("acme")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	d.Drop()
	d.Drop()
	if refs := all(t, b); refs != nil {
		t.Error(refs)
	}
}

func once(t *testing.T, b artifact.Blobs) {
	if put(t, b, "acme", "same") || !put(t, b, "acme", "same") {
		t.Error("whether it existed is not told")
	}
	if refs := all(t, b); len(refs) != 1 || refs[0] != (artifact.Ref{Tenant: "acme", SHA256: sum("same")}) {
		t.Error(refs)
	}
}

func apart(t *testing.T, b artifact.Blobs) {
	put(t, b, "acme", "mine")
	if _, err := get(t, b, "umbrella", "mine"); !fault.Is(err, fault.Gone) {
		t.Error("it is seen:", err)
	}
	if put(t, b, "umbrella", "mine") {
		t.Error("who asks learns what another has")
	}
	if err := b.Remove("umbrella", sum("mine")); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t, b, "acme", "mine"); err != nil {
		t.Error("it went with another's:", err)
	}
}

func names(t *testing.T, b artifact.Blobs) {
	tenants := []string{"%2e%2e", "..", ".", "../../etc", "a/b", "tmp", "ümlaut", "with space"}
	slices.Sort(tenants)
	for _, tenant := range tenants {
		put(t, b, tenant, "x")
	}
	var got []string
	for _, r := range all(t, b) {
		got = append(got, r.Tenant)
	}
	slices.Sort(got)
	if !slices.Equal(got, tenants) {
		t.Errorf("%q", got)
	}
}

func refused(t *testing.T, b artifact.Blobs) {
	for _, s := range []string{"", "..", "../../../etc/passwd", strings.ToUpper(sum("x")), sum("x")[:63], sum("x") + "0"} {
		if _, err := b.Open("acme", s); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", s, err)
		}
		if err := b.Remove("acme", s); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func busy(t *testing.T, b artifact.Blobs) {
	content := strings.Repeat("y", 300_000)
	put(t, b, "acme", content)
	r, err := b.Open("acme", sum(content))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	head := make([]byte, 1000)
	if _, err := io.ReadFull(r, head); err != nil {
		t.Fatal(err)
	}
	put(t, b, "acme", content)
	if err := b.Remove("acme", sum(content)); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(r)
	if err != nil || len(head)+len(rest) != len(content) {
		t.Error(len(rest), err)
	}
}

func together(t *testing.T, b artifact.Blobs) {
	for _, size := range []int{5_000, 100_000} {
		atOnce(t, b, strings.Repeat("z", size))
	}
	if refs := all(t, b); len(refs) != 2 {
		t.Error(refs)
	}
}

func atOnce(t *testing.T, b artifact.Blobs, content string) {
	t.Helper()
	var fresh atomic.Int32
	var writers sync.WaitGroup
	for range 16 {
		writers.Go(func() {
			d, err := b.Draft("acme")
			if err != nil {
				t.Error(err)
				return
			}
			defer d.Drop()
			if _, err := d.Write([]byte(content)); err != nil {
				t.Error(err)
			}
			if existed, err := d.Place(); err != nil {
				t.Error(err)
			} else if !existed {
				fresh.Add(1)
			}
			if r, err := b.Open("acme", sum(content)); err != nil {
				t.Error(err)
			} else {
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, []byte(content)) {
					t.Error("half a blob was seen:", len(got), err)
				}
				r.Close()
			}
		})
	}
	writers.Wait()
	if n := fresh.Load(); n != 1 {
		t.Errorf("%d writers were the first", n)
	}
}

func marks(t *testing.T, b artifact.Blobs) {
	mark := func() string {
		t.Helper()
		r, err := b.Open("acme", sum("m"))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		m, err := r.Mark()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	put(t, b, "acme", "m")
	first := mark()
	if mark() != first {
		t.Error("it changes by reading")
	}
	if err := b.Remove("acme", sum("m")); err != nil {
		t.Fatal(err)
	}
	put(t, b, "acme", "m")
	if mark() == first {
		t.Error("another blob has the same mark")
	}
}

func synced(t *testing.T, b artifact.Blobs) {
	put(t, b, "acme", "1")
	if err := b.Sync(t.Context()); err != nil {
		t.Error(err)
	}
	if got, err := get(t, b, "acme", "1"); err != nil || got != "1" {
		t.Error(got, err)
	}
}

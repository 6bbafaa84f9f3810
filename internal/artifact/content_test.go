package artifact_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

func (w *world) blobFile(a artifact.Artifact) string {
	return filepath.Join(w.dir, "blobs", "t-"+a.Tenant, a.SHA256[:2], a.SHA256)
}

// flip changes one byte of a file and nothing else of it, not even when it was written last.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := []byte{0}
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestS4_104_D12_ContentIsVerified(t *testing.T) {
	content := strings.Repeat("0123456789", 100_000)
	kept := func(t *testing.T) (*world, artifact.Artifact) {
		w := newWorld(t, defaults)
		w.put("f.bin", content)
		return w, w.collect("run1")[0]
	}
	t.Run("a byte that flipped is found before anything is read", func(t *testing.T) {
		w, a := kept(t)
		if w.read(a) != content { // so it is known to be right
			t.Fatal("other bytes")
		}
		flip(t, w.blobFile(a), 777_777)
		if _, _, err := w.Open(t.Context(), tenant, a.ID); !fault.Is(err, fault.Internal) || !strings.Contains(fault.Message(err), "damaged") {
			t.Fatal(err)
		}
	})
	t.Run("one that flips while it is read spoils the end", func(t *testing.T) {
		w, a := kept(t)
		_, c, err := w.Open(t.Context(), tenant, a.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		flip(t, w.blobFile(a), 999_999)
		got, err := io.ReadAll(c)
		if err == nil || len(got) >= len(content) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	})
	t.Run("a content that is cut short or has more is damaged", func(t *testing.T) {
		for _, size := range []int64{0, 999_999, 1_000_001} {
			w, a := kept(t)
			if err := os.Truncate(w.blobFile(a), size); err != nil {
				t.Fatal(err)
			}
			if _, _, err := w.Open(t.Context(), tenant, a.ID); !fault.Is(err, fault.Internal) {
				t.Error(size, err)
			}
		}
	})
	t.Run("S4.102 one that is gone is gone", func(t *testing.T) {
		w, a := kept(t)
		if err := os.Remove(w.blobFile(a)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Open(t.Context(), tenant, a.ID); !fault.Is(err, fault.Gone) {
			t.Fatal(err)
		}
	})
	t.Run("keeping the same bytes again heals it", func(t *testing.T) {
		w, a := kept(t)
		flip(t, w.blobFile(a), 0)
		w.put("again.bin", content)
		w.collect("run2")
		if w.read(a) != content {
			t.Error("other bytes")
		}
	})
	t.Run("parts are read from anywhere", func(t *testing.T) {
		w, a := kept(t)
		_, c, err := w.Open(t.Context(), tenant, a.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for _, at := range []int64{0, 5, 999_990, 3} {
			if _, err := c.Seek(at, io.SeekStart); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 10)
			if _, err := io.ReadFull(c, b); err != nil || string(b) != content[at:at+10] {
				t.Errorf("at %d: %q, %v", at, b, err)
			}
		}
		if _, err := c.Seek(0, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		if all, err := io.ReadAll(c); err != nil || string(all) != content {
			t.Error(len(all), err)
		}
	})
	t.Run("an empty file is one too", func(t *testing.T) {
		w := newWorld(t, defaults)
		w.put("empty", "")
		if a := w.collect("run1")[0]; a.ID == "" || w.read(a) != "" {
			t.Errorf("%+v", a)
		}
	})
}

func TestS4_124_D17_Quotas(t *testing.T) {
	cfg := defaults
	cfg.MaxSessionSize, cfg.MaxTenantSize = diskspace.Charge(1000, 2), diskspace.Charge(1500, 3)
	w := newWorld(t, cfg)
	w.put("a", strings.Repeat("a", 600))
	w.put("b", strings.Repeat("b", 600))
	w.put("c", strings.Repeat("c", 400))
	list := w.collect("run1")
	var got []string
	for _, a := range list {
		got = append(got, a.Path+" "+map[bool]string{true: "kept", false: a.Error}[a.ID != ""])
	}
	full := "the artifacts of this session may have 9.0 KiB together, and 4.6 KiB are kept already, with 4 KiB for each file: remove some"
	if diff := cmp.Diff([]string{"a kept", "b " + full, "c kept"}, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"b"}, w.left()); diff != "" {
		t.Error("what is over the quota stays:", diff)
	}
	t.Run("another session of the tenant has what the tenant has left", func(t *testing.T) {
		list := w.collectAs(tenant, artifact.Origin{Session: "s2", Run: "run2"})
		if len(list) != 1 || !strings.Contains(list[0].Error, "your artifacts may have") {
			t.Errorf("%+v", list)
		}
	})
	t.Run("what is removed makes room, and what waited is kept then", func(t *testing.T) {
		if err := w.Remove(t.Context(), tenant, list[0].ID); err != nil {
			t.Fatal(err)
		}
		if list := w.collect("run3"); len(list) != 1 || list[0].Path != "b" || list[0].ID == "" {
			t.Errorf("%+v", list)
		}
	})
}

// TestQuotas_ManySmall: artifacts of one byte use up the quota by their number.
func TestQuotas_ManySmall(t *testing.T) {
	const files = 10
	cfg := defaults
	cfg.MaxTenantSize = diskspace.Charge(files, files)
	w := newWorld(t, cfg)
	for i := range files + 1 {
		w.put(fmt.Sprintf("%02d", i), "x")
	}
	list := w.collect("run1")
	if last := list[files]; last.ID != "" || !strings.Contains(last.Error, "your artifacts may have") || list[files-1].ID == "" {
		t.Fatalf("%+v", list[files-1:])
	}
	if list := w.collect("run2"); len(list) != 0 && list[0].ID != "" {
		t.Errorf("what is in the index counts less: %+v", list)
	}
	if err := w.Remove(t.Context(), tenant, list[0].ID); err != nil {
		t.Fatal(err)
	}
	if list := w.collect("run3"); len(list) != 1 || list[0].ID == "" {
		t.Errorf("in the place of one that is removed: %+v", list)
	}
}

func TestListing(t *testing.T) {
	w := newWorld(t, defaults)
	for _, name := range []string{"1", "2", "3"} {
		w.put(name, name)
		w.collect("run" + name)
	}
	w.put("other", "1")
	w.collectAs(tenant, artifact.Origin{Session: "s2", Key: "chat-2", Run: "run9"})
	names := func(q artifact.Query) (names []string) {
		t.Helper()
		for {
			page, err := w.List(t.Context(), tenant, q)
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range page.Artifacts {
				names = append(names, a.Name)
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return names
			}
		}
	}
	for what, c := range map[string]struct {
		q    artifact.Query
		want []string
	}{
		"all, newest first":           {artifact.Query{}, []string{"other", "3", "2", "1"}},
		"S4.105 S4.109 of a session":  {artifact.Query{Key: "chat-1"}, []string{"3", "2", "1"}},
		"of a session, page for page": {artifact.Query{Key: "chat-1", Limit: 2}, []string{"3", "2", "1"}},
		"of a run":                    {artifact.Query{Run: "run2"}, []string{"2"}},
		"with a content":              {artifact.Query{SHA256: sum("1")}, []string{"other", "1"}},
		"of nobody":                   {artifact.Query{Key: "nobody"}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			if diff := cmp.Diff(c.want, names(c.q)); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("what is no page is refused", func(t *testing.T) {
		for _, q := range []artifact.Query{{Limit: -1}, {Limit: artifact.MaxLimit + 1}, {Cursor: "!"}} {
			if _, err := w.List(t.Context(), tenant, q); !fault.Is(err, fault.Invalid) {
				t.Errorf("%+v: %v", q, err)
			}
		}
	})
	t.Run("another tenant sees none", func(t *testing.T) {
		page, err := w.List(t.Context(), "umbrella", artifact.Query{})
		if err != nil || page.Artifacts != nil {
			t.Error(page, err)
		}
	})
	t.Run("S4.105 one that is removed is gone with its content, unless another has that", func(t *testing.T) {
		page, err := w.List(t.Context(), tenant, artifact.Query{SHA256: sum("1")})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []int{3, 2} {
			if err := w.Remove(t.Context(), tenant, page.Artifacts[i].ID); err != nil {
				t.Fatal(err)
			}
			if n := len(w.stored()); n != want {
				t.Errorf("%d blobs, not %d", n, want)
			}
			if _, err := w.Get(t.Context(), tenant, page.Artifacts[i].ID); !fault.Is(err, fault.NotFound) {
				t.Error(err)
			}
		}
	})
}

func TestRetentionIsWrittenDown(t *testing.T) {
	cfg := defaults
	cfg.Retention = time.Hour
	w := newWorld(t, cfg)
	w.put("f", "x")
	if a := w.collect("run1")[0]; a.Expires != a.Created.Add(time.Hour) {
		t.Errorf("created %v, expires %v", a.Created, a.Expires)
	}
}

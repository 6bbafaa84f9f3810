package artifact_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/diskspace"
)

// What a sandbox can make the server hold, send or write is bounded, however many files it makes and whatever they are called.

func TestDatasetsAreWrittenOnceForAllFilesOfARun(t *testing.T) {
	w := newWorld(t, defaults)
	o := artifact.Origin{Session: "s1", Run: "run1"}
	for i := range 1000 {
		o.Datasets = append(o.Datasets, artifact.Dataset{ID: fmt.Sprintf("%0128d", i), SHA256: sum(fmt.Sprint(i))})
	}
	for i := range 300 {
		w.put(fmt.Sprint(i), "")
	}
	list := w.collectAs(tenant, o)
	if from, err := w.Datasets(t.Context(), tenant, list[299].ID); err != nil || len(from) != 1000 {
		t.Errorf("%d datasets, %v", len(from), err)
	}
	var written int64
	for _, name := range []string{"cove.db", "cove.db-wal"} {
		if info, err := os.Stat(filepath.Join(w.dir, name)); err == nil {
			written += info.Size()
		}
	}
	if written > 4<<20 {
		t.Errorf("%d bytes are in the database", written)
	}
}

// tally counts what comes out of a sandbox.
type tally struct {
	net.Conn
	read *atomic.Int64
}

func (c tally) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Add(int64(n))
	return n, err
}

func TestWhatHasNoRoomIsNotSent(t *testing.T) {
	cfg := defaults
	cfg.MaxSessionSize = 1 << 20
	w := newWorld(t, cfg)
	for i := range 50 {
		w.put(fmt.Sprintf("%02d", i), "")
		if err := os.Truncate(filepath.Join(w.box.Dir, fmt.Sprintf("%02d", i)), 700<<10); err != nil {
			t.Fatal(err)
		}
	}
	w.put("small", "it fits")
	var read atomic.Int64
	agent := agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		conn, err := w.dial(ctx)
		return tally{conn, &read}, err
	})
	for run, kept := range []string{"00 small", ""} {
		list, err := w.Collect(t.Context(), agent, tenant, artifact.Origin{Session: "s1"}, w.box)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, a := range list {
			if a.ID != "" {
				got = append(got, a.Path)
			} else if !strings.Contains(a.Error, "may have 1.0 MiB together") {
				t.Error(a.Error)
			}
		}
		if strings.Join(got, " ") != kept || len(list) != 51-2*run {
			t.Errorf("run %d: %q of %d", run, got, len(list))
		}
	}
	if n := read.Load(); n > 1<<20 {
		t.Errorf("%d bytes were sent", n)
	}
}

func TestWhatIsRefusedTakesLittleMemory(t *testing.T) {
	w := newWorld(t, defaults)
	deep := filepath.Join(w.box.Dir, strings.Repeat("a", 250), strings.Repeat("b", 250), strings.Repeat("c", 250))
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	const links, sessions = 2000, 20
	for i := range links {
		if err := os.Symlink("/", filepath.Join(deep, fmt.Sprintf("%0200d", i))); err != nil {
			t.Fatal(err)
		}
	}
	before := heap()
	for i := range sessions {
		o := artifact.Origin{Session: fmt.Sprint("s", i)}
		if list := w.collectAs(tenant, o); len(list) != links {
			t.Fatalf("%d are told", len(list))
		}
		if list := w.collectAs(tenant, o); len(list) != 0 {
			t.Fatalf("%d are told again", len(list))
		}
	}
	if grown := heap() - before; grown > 16<<20 {
		t.Errorf("%d bytes are held", grown)
	}
	t.Run("and one that is forgotten is looked at again", func(t *testing.T) {
		w.Forget("s0")
		if list := w.collectAs(tenant, artifact.Origin{Session: "s0"}); len(list) != links {
			t.Errorf("%d are told", len(list))
		}
	})
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestNamesThatAreSpelledLong: a control character has six in JSON, so that these names together fill more than a frame.
func TestNamesThatAreSpelledLong(t *testing.T) {
	w := newWorld(t, defaults)
	dir := strings.Repeat("\x01", 250)
	const files = 6000
	for i := range files {
		w.put(filepath.Join(dir, strings.Repeat("\x02", 240)+fmt.Sprint(i)), "")
	}
	if list := w.collect("run1"); len(list) != files || list[0].ID == "" || list[files-1].ID == "" {
		t.Fatalf("%d are told", len(list))
	}
	if left := w.left(); left != nil {
		t.Errorf("%d are left", len(left))
	}
}

// TestRecallReadsAllOfACollection: what was kept and stays in its box is not kept again by the next server.
func TestRecallReadsAllOfACollection(t *testing.T) {
	w := newWorld(t, defaults)
	w.box.Keep = true
	const files = artifact.MaxLimit + 500
	for i := range files {
		w.put(fmt.Sprint(i), "")
	}
	if list := w.collect("run1"); len(list) != files {
		t.Fatalf("%d are told", len(list))
	}
	w.stop()
	w.start(defaults)
	if list := w.collect("run2"); len(list) != 0 {
		t.Errorf("%d are kept again", len(list))
	}
}

// late is an index whose sums are late for whoever asks while the gate is closed.
type late struct {
	artifact.Index
	asked chan struct{}
	gate  chan struct{}
	armed *atomic.Bool
}

func (l late) ArtifactsHeld(ctx context.Context, tenant, session string) (artifact.Held, error) {
	held, err := l.Index.ArtifactsHeld(ctx, tenant, session)
	if l.armed.CompareAndSwap(true, false) {
		close(l.asked)
		<-l.gate
	}
	return held, err
}

func TestAQuotaHoldsForWhoComesAsAnotherEnds(t *testing.T) {
	w := newWorld(t, defaults)
	index := late{w.index, make(chan struct{}), make(chan struct{}), new(atomic.Bool)}
	cfg := defaults
	cfg.MaxTenantSize = diskspace.Charge(1000, 1)
	var k *artifact.Keeper
	second := make(chan error, 1)
	ended := make(chan struct{})
	var once atomic.Bool
	cfg.Step = func(step string) {
		if step != "placed" || !once.CompareAndSwap(false, true) {
			return
		}
		index.armed.Store(true)
		go func() {
			defer close(ended)
			_, err := k.Keep(context.Background(), w.agent, tenant, artifact.Origin{Session: "s2"}, filepath.Join(w.dir, "other"))
			second <- err
		}()
		select {
		case <-index.asked:
		case <-ended:
		}
	}
	k, err := artifact.New(t.Context(), cfg, w.blobs, index)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	w.put("mine", strings.Repeat("m", 900))
	if err := os.WriteFile(filepath.Join(w.dir, "other"), []byte(strings.Repeat("o", 900)), 0o644); err != nil {
		t.Fatal(err)
	}
	list, err := k.Collect(t.Context(), w.agent, tenant, artifact.Origin{Session: "s1"}, w.box)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	close(index.gate)
	if err := <-second; err == nil {
		t.Error("both are kept")
	}
	held, err := w.index.ArtifactsHeld(t.Context(), tenant, "s1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(artifact.Held{Tenant: 900, TenantFiles: 1, Session: 900, Files: 1}, held); diff != "" {
		t.Error(diff)
	}
}

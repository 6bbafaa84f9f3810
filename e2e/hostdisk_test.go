package e2e_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// readBack reads a file past every cache of the sandbox and gives its digest.
const readBack = "dd if=%s iflag=direct bs=1M status=none | sha256sum | cut -d' ' -f1"

// keeper is a sandbox of a tenant that fills no disk. All it has written must be whole at every
// moment.
type keeper struct {
	*sandbox
	kind string
	sum  string
}

func newKeeper(kind string, s *sandbox) *keeper {
	k := &keeper{sandbox: s, kind: kind}
	k.sum = s.sh("head -c 12000000 /dev/urandom > kept; sync -f kept; " + fmt.Sprintf(readBack, "kept"))
	return k
}

// check reads what was written before, writes more and reads that. It reports what is wrong.
func (k *keeper) check(round int) error {
	line := fmt.Sprintf("set -e; "+readBack+"; head -c 200000 /dev/urandom > new; sha256sum < new | cut -d' ' -f1; sync new; "+readBack, "kept", "new")
	ctx, cancel := context.WithTimeout(k.t.Context(), 2*patience)
	defer cancel()
	out, err := k.Exec(ctx, client.ExecRequest{Argv: []string{"bash", "-c", line}, TimeoutSeconds: 100})
	if err != nil {
		return fmt.Errorf("%s, round %d: %w", k.kind, round, err)
	}
	got := strings.Fields(out.Stdout)
	if len(got) != 3 || got[0] != k.sum || got[1] != got[2] {
		return fmt.Errorf("%s, round %d: read %v, not %s and twice the same: exit %d %s", k.kind, round, got, k.sum, out.ExitCode, out.Stderr)
	}
	return nil
}

// TestHostDisk fills the disk of the server with the sandboxes of one tenant: no sandbox of the
// other loses a byte.
func TestHostDisk(t *testing.T) {
	slow.Test(t)
	s := smallServer(t, 4<<30, "COVE_STORAGE_MAX_TENANT_SIZE=4GiB") // TestTenantDiskQuota has the quota
	other, err := client.New(s.url, foreignKey(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	volatile := s.create(t, client.CreateRequest{})
	keepers := []*keeper{
		newKeeper("volatile", volatile),
		newKeeper("durable", s.create(t, client.CreateRequest{Storage: "durable"})),
	}
	forked, err := volatile.Fork(t.Context(), client.ForkRequest{Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	keepers = append(keepers, &keeper{&sandbox{t, forked.Sandboxes[0]}, "branch", keepers[0].sum})
	if _, err := volatile.Snapshot(t.Context(), client.SnapshotRequest{Name: "kept"}); err != nil {
		t.Fatal(err)
	}
	defer s.RemoveTemplate(context.WithoutCancel(t.Context()), "kept")
	keepers = append(keepers, &keeper{s.create(t, client.CreateRequest{Template: "kept"}), "of a snapshot", keepers[0].sum})

	t.Run("nothing starts below the reserve", func(t *testing.T) {
		refusedBelowReserve(t, s, volatile, "the disk is full", func() func() { return s.fill(t, 300<<20) })
	})
	t.Run("nothing starts without free inodes", func(t *testing.T) {
		refusedBelowReserve(t, s, volatile, "full of files", func() func() { return s.fillFiles(t) })
	})
	t.Run("uploads of another tenant", func(t *testing.T) { fillByUploads(t, s, other, keepers) })
	for _, c := range []struct{ claim, storage, line string }{
		{"one large write", "volatile", `python3 -c "import os; f=os.open('fill', os.O_WRONLY|os.O_CREAT); b=bytes(300<<20)
while True: os.write(f, b)"`},
		{"zeros", "volatile", "dd if=/dev/zero of=fill bs=1M"},
		{"holes first", "durable", "fallocate -l 1900M fill; dd if=/dev/zero of=fill bs=1M conv=notrunc"},
	} {
		t.Run(c.storage+", "+c.claim, func(t *testing.T) {
			fillAll(t, s, other, keepers, c.storage, c.line)
		})
	}
	t.Run("volumes", func(t *testing.T) { fillVolumes(t, s, other, keepers) })
	t.Run("many that write little", func(t *testing.T) {
		if os.Getenv("COVE_E2E_FULL") == "" {
			t.Skip("writing little takes two minutes: make test-all does")
		}
		fillSlowly(t, s, other, keepers)
	})
}

// fillByUploads has the server itself write for another tenant until it refuses: bodies that are larger than the disk, and
// bodies that fit. Sandboxes write a little all the time, and none is ended.
func fillByUploads(t *testing.T, s *server, other *client.Client, keepers []*keeper) {
	free := s.fill(t, 1200<<20)
	defer free()
	open := func() error {
		_, err := other.OpenSession(t.Context(), "uploads", client.SessionRequest{Datasets: &client.SessionDatasets{Access: "api"}})
		return err
	}
	if err := open(); err != nil {
		t.Fatal(err)
	}
	defer other.RemoveSession(context.WithoutCancel(t.Context()), "uploads")
	small, err := other.Create(t.Context(), client.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer small.Kill(context.WithoutCancel(t.Context()))
	watch := s.watchFree(t)
	stage := func(id string, bytes int64) error {
		content := rand.NewChaCha8(sha256.Sum256([]byte(id)))
		_, err := other.StageDataset(t.Context(), "uploads", id, "", io.LimitReader(content, bytes))
		return err
	}
	for _, c := range []struct {
		what   string
		upload func() error
	}{
		{"a dataset larger than the disk", func() error { return stage("oversized", 2<<30) }},
		{"datasets that fit", func() (err error) {
			for i := 0; err == nil; i++ {
				err = stage(fmt.Sprint("fits", i), 100<<20)
			}
			return err
		}},
		{"an image larger than the disk", func() error {
			_, err := other.ImportImage(t.Context(), "oversized", &zeros{left: 2 << 30})
			return err
		}},
	} {
		refused := make(chan error, 1)
		go func() { refused <- c.upload() }()
		for round, done := 0, false; !done; round++ {
			select {
			case err := <-refused:
				if done = true; client.KindOf(err) != client.DiskFull {
					t.Errorf("%s: got %v of kind %q", c.what, err, client.KindOf(err))
				}
			default:
			}
			for _, k := range keepers {
				if err := k.check(round); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := small.Exec(t.Context(), client.ExecRequest{Command: "head -c 500000 /dev/urandom >> more; sync more"}); err != nil {
				t.Errorf("%s: a sandbox of the tenant that uploads: %v", c.what, err)
			}
		}
	}
	least := watch()
	t.Logf("at least %d MB were free", least>>20)
	if least < 300<<20 { // the reserve is 400, and sandboxes write too
		t.Errorf("the server's own files left %d MB of the disk", least>>20)
	}
	for _, k := range append([]*keeper{{&sandbox{t, small}, "of the tenant that uploads", ""}}, keepers...) {
		if err := k.Refresh(t.Context()); err != nil || k.State != "running" {
			t.Errorf("the sandbox %s: %s, %s, %v", k.kind, k.State, k.Message, err)
		}
	}
	if err := other.RemoveSession(t.Context(), "uploads"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is space for a dataset again", patience, func() bool { return open() == nil && stage("again", 100<<20) == nil })
}

// watchFree notes the least space that is free until stop is called.
func (s *server) watchFree(t *testing.T) (stop func() int64) {
	end, least := make(chan struct{}), make(chan int64)
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		free := int64(math.MaxInt64)
		for {
			select {
			case <-end:
				least <- free
				return
			case <-tick.C:
				var st unix.Statfs_t
				if unix.Statfs(s.dir, &st) == nil {
					free = min(free, int64(st.Bavail)*st.Bsize)
				}
			}
		}
	}()
	stop = sync.OnceValue(func() int64 { close(end); return <-least })
	t.Cleanup(func() { stop() })
	return stop
}

// refusedBelowReserve has fill leave less than the reserve, a tenth of this file system's bytes or
// 2 % of its inodes, and more than what stops a sandbox.
func refusedBelowReserve(t *testing.T, s *server, running *sandbox, sentence string, fill func() (free func())) {
	if _, err := s.OpenSession(t.Context(), "refused", client.SessionRequest{Datasets: &client.SessionDatasets{Access: "api"}}); err != nil {
		t.Fatal(err)
	}
	defer s.RemoveSession(context.WithoutCancel(t.Context()), "refused")
	free := fill()
	defer free()
	for what, ask := range map[string]func() error{
		"a create": func() error { _, err := s.Create(t.Context(), client.CreateRequest{}); return err },
		"a fork":   func() error { _, err := running.Fork(t.Context(), client.ForkRequest{Count: 1}); return err },
		"a session": func() error {
			_, err := s.OpenSession(t.Context(), "none", client.SessionRequest{})
			return err
		},
		"a snapshot": func() error {
			_, err := running.Snapshot(t.Context(), client.SnapshotRequest{Name: "none"})
			return err
		},
		"a volume": func() error { _, err := s.CreateVolume(t.Context(), client.VolumeRequest{Name: "none"}); return err },
		"a dataset": func() error {
			_, err := s.StageDataset(t.Context(), "refused", "none", "", strings.NewReader("x"))
			return err
		},
		"an image": func() error {
			_, err := s.ImportImage(t.Context(), "none", &zeros{left: 1 << 10})
			return err
		},
	} {
		err := ask()
		if client.KindOf(err) != client.DiskFull || !strings.Contains(err.Error(), "disk is full") {
			t.Errorf("%s: got %v of kind %q", what, err, client.KindOf(err))
		}
		if files := sentence == "full of files"; err != nil && files != strings.Contains(err.Error(), sentence) {
			t.Errorf("%s: it says %v", what, err)
		}
	}
	if code, said := readyz(t, s); code != http.StatusServiceUnavailable || !strings.Contains(said, sentence) {
		t.Errorf("/readyz says %d %s", code, said)
	}
	if out := s.doctor(t); !strings.Contains(out, "nothing new is started") {
		t.Errorf("cove doctor says\n%s", out)
	}
	running.sh("head -c 3000000 /dev/urandom > more; sync -f more")
	before := s.rows(t)
	for range 10 { // no create that is refused leaves a row
		if _, err := s.Create(t.Context(), client.CreateRequest{Storage: "tmpfs"}); client.KindOf(err) != client.DiskFull {
			t.Errorf("a create in memory: got %v of kind %q", err, client.KindOf(err))
		}
	}
	if n := s.rows(t) - before; n != 0 {
		t.Errorf("%d refused sandboxes have rows", n)
	}
	free()
	s.create(t, client.CreateRequest{}).kill()
	s.create(t, client.CreateRequest{Storage: "tmpfs"}).kill()
}

// rows counts the tenant's sandboxes, ended ones too.
func (s *server) rows(t *testing.T) (n int) {
	t.Helper()
	for _, err := range s.List(t.Context(), client.ListRequest{}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// fillFiles leaves 1 % of the inodes of the data directory's file system; the function frees them
// again.
func (s *server) fillFiles(t *testing.T) (free func()) {
	t.Helper()
	dir := filepath.Join(filepath.Dir(s.dir), "files")
	free = sync.OnceFunc(func() { _ = os.RemoveAll(dir) })
	for i := 0; ; i++ {
		if i%100 == 0 {
			var st unix.Statfs_t
			if err := unix.Statfs(s.dir, &st); err != nil {
				t.Fatal(err)
			}
			if st.Ffree < st.Files/100 {
				return free
			}
		}
		at := filepath.Join(dir, fmt.Sprint(i/1000))
		if err := errors.Join(os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, fmt.Sprint(i)), nil, 0o600)); err != nil {
			free()
			t.Fatal(err)
		}
	}
}

// doctor is what cove doctor prints, whatever it thinks of this host.
func (s *server) doctor(t *testing.T) string {
	t.Helper()
	out, _ := exec.Command(binary.path, "doctor", "--data-dir", s.dir).CombinedOutput()
	return string(out)
}

// fillAll has three sandboxes write as much as they can.
func fillAll(t *testing.T, s *server, other *client.Client, keepers []*keeper, storage, line string) {
	var fillers []*client.Sandbox
	for range 3 {
		var sb *client.Sandbox
		eventually(t, "there is space for a sandbox", patience, func() (ok bool) {
			var err error
			if sb, err = other.Create(t.Context(), client.CreateRequest{Storage: storage}); err != nil && client.KindOf(err) != client.DiskFull {
				t.Fatal(err)
			}
			return err == nil
		})
		fillers = append(fillers, sb)
		defer sb.Kill(context.WithoutCancel(t.Context()))
	}
	fillWith(t, s, other, keepers, fillers, line)
	for _, sb := range fillers {
		_ = other.Sandbox(sb.ID).Kill(t.Context())
	}
	eventually(t, "there is space again", patience, func() bool {
		sb, err := other.Create(t.Context(), client.CreateRequest{})
		if err == nil {
			_ = sb.Kill(t.Context())
		}
		return err == nil
	})
}

// fillWith runs a line in sandboxes of another tenant that fills the disk until it ends or they
// do, and looks at the keepers meanwhile. One of the fillers at least is ended for it. It gives
// the least space that was free.
func fillWith(t *testing.T, s *server, other *client.Client, keepers []*keeper, fillers []*client.Sandbox, line string) (least int64) {
	var work sync.WaitGroup
	for _, sb := range fillers {
		work.Go(func() {
			_, _ = other.Sandbox(sb.ID).Exec(t.Context(), client.ExecRequest{Argv: []string{"bash", "-c", line}, TimeoutSeconds: 90})
		})
	}
	filled := make(chan struct{})
	go func() { work.Wait(); close(filled) }()
	watch := s.watchFree(t)
	for round, done := 0, false; !done; round++ {
		select {
		case <-filled:
			done = true // and one round more
		default:
		}
		for _, k := range keepers {
			if err := k.check(round); err != nil {
				t.Fatal(err)
			}
		}
	}
	full := 0
	for _, sb := range fillers {
		info, err := other.Get(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %s %s %s", sb.ID, info.State, info.Cause, info.Message)
		switch {
		case info.Cause == "host_disk_full":
			full++
		case info.State != "running":
			t.Errorf("a sandbox that wrote is %s, %s: %s", info.State, info.Cause, info.Message)
		}
	}
	least = watch()
	t.Logf("at least %d MB were free", least>>20)
	if full == 0 {
		t.Error("no sandbox was ended to make room")
	}
	return least
}

// fillVolumes has sandboxes write as much as they can to volumes, which outlive them. What was
// synced is whole afterwards.
func fillVolumes(t *testing.T, s *server, other *client.Client, keepers []*keeper) {
	free := s.fill(t, 2000<<20)
	defer free()
	start := func(volume string) (*client.Sandbox, error) {
		return other.Create(t.Context(), client.CreateRequest{Mounts: []client.Mount{{Kind: "volume", Source: volume, Target: "/data", Create: true}}})
	}
	var fillers []*client.Sandbox
	for _, volume := range []string{"one", "one", "two"} {
		sb, err := start(volume)
		if err != nil {
			t.Fatal(err)
		}
		defer sb.Kill(context.WithoutCancel(t.Context()))
		fillers = append(fillers, sb)
	}
	kept := newKeeper("of a volume", &sandbox{t, fillers[0]})
	kept.sh("cp kept /data/kept; sync /data/kept")
	least := fillWith(t, s, other, keepers, fillers, "dd if=/dev/zero of=/data/fill-$$ bs=1M")
	if least < 60<<20 { // below 100 the one that wrote most is ended
		t.Errorf("what was written to volumes left %d MB of the disk", least>>20)
	}
	// The second of the two that have volume one ends when what it is writing has come to an end.
	var ends []string
	eventually(t, "both that have the volume go on, or neither", patience, func() bool {
		ends = nil
		running := 0
		for _, sb := range fillers[:2] {
			if err := sb.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			ends = append(ends, sb.State+": "+sb.Message)
			if sb.State != "ended" {
				running++
			}
		}
		return running != 1
	})
	if all := strings.Join(ends, "; "); strings.Contains(all, "ended") && strings.Count(all, "a volume of this sandbox was being filled") != 1 {
		t.Errorf("a volume was taken from one of its two sandboxes: %s", all)
	}
	for _, sb := range fillers {
		_ = sb.Kill(t.Context()) // it may have ended
	}
	free() // for the sandbox that looks at what is left
	eventually(t, "an unused volume is removed", patience, func() bool { return other.RemoveVolume(t.Context(), "two") == nil })
	var refused string
	eventually(t, "a volume that was filled is used again", patience, func() bool {
		sb, err := start("one")
		if err != nil {
			if err.Error() != refused {
				refused = err.Error()
				t.Log(refused)
			}
			return false
		}
		defer sb.Kill(t.Context())
		again := &sandbox{t, sb}
		if sum := again.sh(fmt.Sprintf(readBack, "/data/kept")); sum != kept.sum {
			t.Errorf("what was synced to the volume is %s, not %s", sum, kept.sum)
		}
		again.sh("rm /data/fill-*; echo more > /data/more; sync /data/more")
		return true
	})
	eventually(t, "the volume is removed", patience, func() bool { return other.RemoveVolume(t.Context(), "one") == nil })
}

// slowWriter writes at most 40 KiB a second past the cache, into space that the file system of the
// sandbox has given to the file but the host's has not.
const slowWriter = `fallocate -l 300M fill; for ((i = 0; ; i++)); do
	dd if=/dev/zero of=fill bs=4k count=1 seek=$i conv=notrunc oflag=direct status=none; sleep 0.1; done`

// fillSlowly has sandboxes of another tenant write so little at a time that none of them stands
// out.
func fillSlowly(t *testing.T, s *server, other *client.Client, keepers []*keeper) {
	var fillers []*client.Sandbox
	for range 16 {
		sb, err := other.Create(t.Context(), client.CreateRequest{Template: "base"})
		if err != nil {
			t.Fatal(err)
		}
		defer sb.Kill(context.WithoutCancel(t.Context()))
		fillers = append(fillers, sb)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	for _, sb := range fillers {
		work.Go(func() { _, _ = sb.Exec(ctx, client.ExecRequest{Argv: []string{"bash", "-c", slowWriter}}) })
	}
	eventually(t, "all sandboxes write", patience, func() bool {
		for _, sb := range fillers {
			if out, err := sb.Exec(ctx, client.ExecRequest{Command: "test -e fill"}); err != nil || out.ExitCode != 0 {
				return false
			}
		}
		return true
	})
	time.Sleep(45 * time.Second) // until file systems have written what they owed for their first files
	free := s.fill(t, 45<<20)    // sandboxes that write a lot would be ended at once
	defer free()
	watch := s.watchFree(t)
	full := 0
	eventually(t, "two of the sandboxes that write are ended", patience, func() bool {
		full = 0
		for _, sb := range fillers {
			if err := sb.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			if sb.Cause == "host_disk_full" {
				full++
			}
		}
		return full >= 2
	})
	if full == len(fillers) {
		t.Error("all sandboxes of the tenant were ended, though each takes little space")
	}
	if least := watch(); least < 10<<20 { // below 25 those that write little are ended
		t.Errorf("they left %d MB of the disk", least>>20)
	}
	cancel()
	free()
	for _, k := range keepers {
		if err := k.check(0); err != nil {
			t.Error(err)
		}
		if err := k.Refresh(t.Context()); err != nil || k.State != "running" {
			t.Errorf("the sandbox %s: %s, %s, %v", k.kind, k.State, k.Message, err)
		}
	}
}

// TestTenantDiskQuota has one tenant write as much as it may have: what it runs goes on, and it
// gets nothing new.
func TestTenantDiskQuota(t *testing.T) {
	s := smallServer(t, 4<<30, "COVE_STORAGE_MAX_TENANT_SIZE=200MiB")
	other, err := client.New(s.url, foreignKey(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	sb := s.create(t, client.CreateRequest{})
	sb.sh("dd if=/dev/urandom of=large bs=1M count=210 oflag=direct")
	eventually(t, "nothing new is given to the tenant", patience, func() bool {
		made, err := s.Create(t.Context(), client.CreateRequest{})
		if err == nil {
			_ = made.Kill(t.Context())
			return false
		}
		expect(t, err, client.Exhausted, "this server allows 200")
		return true
	})
	for what, ask := range map[string]func() error{
		"a fork":     func() error { _, err := sb.Fork(t.Context(), client.ForkRequest{Count: 1}); return err },
		"a snapshot": func() error { _, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "none"}); return err },
		"a volume":   func() error { _, err := s.CreateVolume(t.Context(), client.VolumeRequest{Name: "none"}); return err },
	} {
		if err := ask(); client.KindOf(err) != client.Exhausted {
			t.Errorf("%s: got %v of kind %q", what, err, client.KindOf(err))
		}
	}
	sb.sh("echo more > more")
	made, err := other.Create(t.Context(), client.CreateRequest{})
	if err != nil {
		t.Fatalf("another tenant: %v", err)
	}
	_ = made.Kill(t.Context())
	sb.kill()
	eventually(t, "the tenant gets something new", patience, func() bool {
		made, err := s.Create(t.Context(), client.CreateRequest{})
		if err == nil {
			_ = made.Kill(t.Context())
		}
		return err == nil
	})
}

// TestStartOnFullDisk kills a server, and its maker too, while not a byte is free.
func TestStartOnFullDisk(t *testing.T) {
	s := smallServer(t, 4<<30)
	s.ready = filepath.Join(t.TempDir(), "ready.json")
	// On the disk, what the kernel still had to write would end it.
	kept := s.create(t, client.CreateRequest{Storage: "tmpfs"})
	kept.value("x = 41")
	ending := s.create(t, client.CreateRequest{})
	// The server stands still meanwhile: what it keeps for its database is not for the filler.
	_ = s.cmd.Process.Signal(unix.SIGSTOP)
	free := s.fillUp(t)
	_ = s.cmd.Process.Signal(unix.SIGCONT)
	eventually(t, "the end of a sandbox is recorded", patience, func() bool {
		_ = ending.Kill(t.Context())
		sb, err := s.Get(t.Context(), ending.ID)
		return err == nil && sb.State == "ended"
	})
	s.crash(t)
	free()
	s.start(t) // and keeps space again
	s.crash(t)
	s.fillUp(t)
	s.start(t)
	k := &sandbox{t, s.Sandbox(kept.ID)}
	if got := k.value("x + 1"); got != "42" {
		t.Errorf("the sandbox says %s", got)
	}
	s.crash(t)
	if pid := makerPID(s.dir); pid != 0 {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	eventually(t, "the maker is gone", patience, func() bool { return makerPID(s.dir) == 0 })
	free = s.fillUp(t)
	s.start(t)
	_, err := s.Create(t.Context(), client.CreateRequest{})
	expect(t, err, client.DiskFull, "the server's disk is full")
	free()
	eventually(t, "there is space again", patience, func() bool {
		sb, err := s.Create(t.Context(), client.CreateRequest{})
		if err == nil {
			_ = sb.Kill(t.Context())
		}
		return err == nil
	})
}

// fillUp leaves nothing at all.
func (s *server) fillUp(t *testing.T) (free func()) {
	t.Helper()
	most := s.fill(t, 0)
	name := filepath.Join(filepath.Dir(s.dir), "rest")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err = nil; err == nil; { // with its metadata, which takes blocks too
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	return func() { most(); _ = os.Remove(name) }
}

// TestDamagedDisk has programs of the host take the last byte, which no reserve prevents: a sandbox
// whose writes are lost ends with a cause.
func TestDamagedDisk(t *testing.T) {
	s := smallServer(t, 4<<30)
	for _, storage := range []string{"volatile", "durable"} {
		t.Run(storage, func(t *testing.T) {
			sb := s.create(t, client.CreateRequest{Storage: storage})
			free := s.fillUp(t)
			defer free()
			// Less than what would stop it, and past the caches. How this ends is told by the
			// sandbox's end.
			_, _ = sb.Exec(t.Context(), client.ExecRequest{Argv: []string{"bash", "-c", "head -c 30000 /dev/urandom > new; dd if=new iflag=direct bs=1M of=/dev/null; sync new"}})
			info := s.ended(t, sb.ID)
			if info.Cause != "host_disk_full" {
				t.Errorf("it ended with the cause %s: %s", info.Cause, info.Message)
			}
		})
	}
}

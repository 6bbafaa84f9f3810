package chaos_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/testserver"
)

// onSmallDisk makes a server whose data directory has a file system of its own.
func onSmallDisk(f *fault, bytes int64) *testserver.Server {
	f.Helper()
	s := testserver.Make(f)
	image, aside := s.Dir+".img", s.Dir+".aside"
	if err := errors.Join(os.Rename(s.Dir, aside), os.Mkdir(s.Dir, 0o755), os.WriteFile(image, nil, 0o600), os.Truncate(image, bytes)); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { // before the server's own cleanup, which removes the directory
		s.EndProcesses()
		f.eventually("the file system is not used any more", soon, func() bool {
			err := unix.Unmount(s.Dir, 0)
			return err == nil || errors.Is(err, unix.EINVAL)
		})
	})
	for _, argv := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-m", "0", image}, {"mount", "-o", "loop", image, s.Dir}, {"cp", "-a", aside + "/templates", s.Dir}, {"chmod", "755", s.Dir},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			f.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	s.Start(f)
	return s
}

// TestHostDiskFull has one sandbox write until the host's disk is full. It is the one that ends, and no other loses a byte,
// neither of its tenant nor of another, volatile or durable.
func TestHostDiskFull(t *testing.T) {
	f := begin(t, "host's disk: one sandbox fills it under load")
	s := onSmallDisk(f, 4<<30)
	key, err := s.CreateKey(f.Context(), client.KeyRequest{Tenant: "other", Name: "of the tenant that fills the disk"})
	if err != nil {
		f.Fatal(err)
	}
	other, err := client.New(s.URL, key.Secret)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { other.Close() })
	residents := f.settle(s, 1, client.CreateRequest{})
	residents = append(residents, f.settle(s, 1, client.CreateRequest{Storage: "durable"})...)
	for _, r := range f.settleOf(other, 1, client.CreateRequest{}) {
		r.api = other
		residents = append(residents, r)
	}
	f.eventually("both tenants' pools have their kernels", patience, func() bool {
		c, err := s.Count(f.Context())
		return err == nil && c["maker's pool"] >= 16 && c["zygotes' children"] == c["maker's slots"]
	})
	before := f.count(s, residents)
	greedy, err := other.Create(f.Context(), client.CreateRequest{TimeoutSeconds: 3600})
	if err != nil {
		f.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(s.Dir, "filler"))
	if err != nil {
		f.Fatal(err)
	}
	defer filler.Close()
	var room unix.Statfs_t
	if err := unix.Fstatfs(int(filler.Fd()), &room); err != nil {
		f.Fatal(err)
	}
	// What other programs of the host have; the sandbox writes the rest.
	if err := unix.Fallocate(int(filler.Fd()), 0, 0, int64(room.Bavail)*room.Bsize-1<<30); err != nil {
		f.Fatal(err)
	}
	work := f.workload(s, clients)
	ctx, cancel := context.WithCancel(f.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = greedy.Exec(ctx, client.ExecRequest{Command: "dd if=/dev/zero of=big bs=1M"}) // how it ends is asked below
	}()
	f.eventually("the sandbox that fills the disk has ended, and with that cause", soon, func() bool {
		sb, err := other.Get(f.Context(), greedy.ID)
		return err == nil && sb.State == "ended" && sb.Cause == "host_disk_full"
	})
	cancel()
	<-ended
	f.stillThere(s, residents)
	if err := os.Remove(filler.Name()); err != nil {
		f.Fatal(err)
	}
	if err := filler.Close(); err != nil {
		f.Fatal(err)
	}
	f.serves(s, time.Now(), soon)
	work.end()
	f.stillThere(s, residents)
	f.onlySaw("ok", "507", "503", "stream-unavailable", "410")
	f.nothingLeft(s, residents, before)
}

// TestLayerDamaged takes a file out of a template's layer while no server runs. Other templates serve all the time, and this
// one does once it is built again.
func TestLayerDamaged(t *testing.T) {
	f := begin(t, "template: a file of its layer removed after kill -9")
	s := testserver.Make(f, "COVE_TEMPLATE_PREPARE=own")
	definition := "name = 'own'\nfrom = 'base'\n[files]\n'/etc/motd' = 'hello'\n"
	if err := os.WriteFile(filepath.Join(s.Dir, "templates", "own.toml"), []byte(definition), 0o644); err != nil {
		f.Fatal(err)
	}
	s.Start(f)
	shows := func() (string, error) {
		ctx, cancel := context.WithTimeout(f.Context(), patience)
		defer cancel()
		sb, err := s.Create(ctx, client.CreateRequest{Template: "own"})
		if err != nil {
			return "", err
		}
		out, err := sb.Exec(ctx, client.ExecRequest{Command: "cat /etc/motd"})
		return out.Stdout, errors.Join(err, sb.Kill(ctx))
	}
	if text, err := shows(); err != nil || text != "hello" {
		f.Fatalf("before the fault the template shows %q, %v", text, err)
	}
	s.Crash(f)
	found, err := filepath.Glob(filepath.Join(s.Dir, "templates/built/layers/own-*/trees/@/etc/motd"))
	if err != nil || len(found) != 1 {
		f.Fatalf("the file of the layer: %v, %v", found, err)
	}
	if err := os.Remove(found[0]); err != nil {
		f.Fatal(err)
	}
	began := time.Now()
	s.Start(f)
	f.eventually("a sandbox of the template has its file again", soon, func() bool {
		text, err := shows()
		f.saw(status(err))
		if err == nil && text != "hello" {
			f.Errorf("a sandbox started from the damaged layer: it shows %q", text)
		}
		return err == nil
	})
	f.row.Service = time.Since(began).Seconds()
	f.eventually("/readyz says that all is well", soon, func() bool {
		code, _ := f.ready(s)
		return code == http.StatusOK
	})
	f.onlySaw("ok", "503")
}

package wire_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/sandbox"
)

// TestReceive_AsManyFilesAsForks has one message carry what the answer to the largest fork carries.
func TestReceive_AsManyFilesAsForks(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	from, err := wire.Conn(os.NewFile(uintptr(fds[0]), "from"))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := wire.Conn(os.NewFile(uintptr(fds[1]), "to"))
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	files := make([]*os.File, sandbox.MaxForks)
	for i := range files {
		if files[i], err = os.Open(os.DevNull); err != nil {
			t.Fatal(err)
		}
	}
	defer wire.CloseAll(files)

	if err := wire.Send(from, wire.Response{}, files...); err != nil {
		t.Fatal(err)
	}

	var got wire.Response
	received, err := wire.Receive(to, &got)
	defer wire.CloseAll(received)
	if err != nil || len(received) != len(files) {
		t.Errorf("%d of %d descriptors arrived: %v", len(received), len(files), err)
	}
}

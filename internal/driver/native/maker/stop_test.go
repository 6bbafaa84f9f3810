package maker_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
)

// TestServe_ShutdownConnectionStays collects garbage while a maker ends: who asked for the end reads the end of the
// connection as that of the process.
func TestServe_ShutdownConnectionStays(t *testing.T) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "socket"), Net: "unixpacket"})
	noError(t, err)
	c, err := net.DialUnix("unixpacket", nil, l.Addr().(*net.UnixAddr))
	noError(t, err)
	defer c.Close()
	noError(t, wire.Send(c, wire.Request{Op: wire.OpShutdown}))
	keep, err := maker.ServeNothing(l)
	noError(t, err)
	var r wire.Response
	_, err = wire.Receive(c, &r)
	noError(t, err)
	for range 3 {
		runtime.GC()
	}
	noError(t, c.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection is over while the process runs: %v", err)
	}
	runtime.KeepAlive(keep)
}

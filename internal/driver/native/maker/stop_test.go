package maker_test

import (
	"context"
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

// TestServe_ConnectionsAreBounded has one connection more than a maker answers closed, and another
// one answered when one of the first has ended.
func TestServe_ConnectionsAreBounded(t *testing.T) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "socket"), Net: "unixpacket"})
	noError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- maker.ServeFew(ctx, l, 2) }()
	defer func() { stop(); noError(t, <-served) }()
	answers := func() (*net.UnixConn, bool) {
		t.Helper()
		c, err := net.DialUnix("unixpacket", nil, l.Addr().(*net.UnixAddr))
		noError(t, err)
		t.Cleanup(func() { c.Close() })
		var r wire.Response
		// One that is closed has none: it may be closed before or after the request is sent.
		if wire.Send(c, wire.Request{Op: "none"}) != nil {
			return c, false
		}
		_, err = wire.Receive(c, &r)
		return c, err == nil
	}
	first, ok := answers()
	_, second := answers()
	if !ok || !second {
		t.Fatalf("the first two: %v, %v", ok, second)
	}
	if _, ok := answers(); ok {
		t.Error("a third one is answered")
	}
	first.Close()
	for deadline := time.Now().Add(time.Minute); ; {
		if _, ok := answers(); ok {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no other is answered after one has ended")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

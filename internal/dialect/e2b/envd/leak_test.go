package envd_test

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	pb "github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
)

func TestNothingIsLeftBehind(t *testing.T) {
	signals := make(chan os.Signal, 1) // os/signal keeps one goroutine for ever once anybody has listened, as the agent does
	signal.Notify(signals, syscall.SIGCHLD)
	signal.Stop(signals)
	before := runtime.NumGoroutine()
	t.Run("a life", func(t *testing.T) {
		w := newWorld(t)
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := w.processes().Start(ctx, connect.NewRequest(bash("sleep 600")))
		if err != nil || !stream.Receive() {
			t.Fatal(err, stream.Err())
		}
		watch, err := w.files().WatchDir(ctx, connect.NewRequest(&pb.WatchDirRequest{Path: w.home}))
		if err != nil || !watch.Receive() {
			t.Fatal(err, watch.Err())
		}
		for range 3 {
			if _, err := w.files().CreateWatcher(ctx, connect.NewRequest(&pb.CreateWatcherRequest{Path: w.home})); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		if _, err := w.manager.Kill(t.Context(), acme, w.box.ID); err != nil {
			t.Fatal(err)
		}
	})
	for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
		}
	}
}

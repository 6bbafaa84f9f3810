package native_test

import (
	"context"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// TestMakerDeath kills a maker of its own.
func TestMakerDeath(t *testing.T) {
	built := buildTemplate(t, "base")
	dir, err := os.MkdirTemp("", "cove-maker-death")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	d, err := openDriver(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	request := func(id string) sandbox.StartRequest {
		return sandbox.StartRequest{
			ID: id, Tenant: tenant, Template: built, Network: policy.Network{Mode: policy.None},
			Limits: template.Limits{CPUs: 1, MemoryBytes: 256 << 20, Pids: 64},
		}
	}
	if err := d.Start(ctx, request("first")); err != nil {
		t.Fatal(err)
	}
	agent := agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, "first") })
	if _, err := agent.Hello(ctx); err != nil {
		t.Fatal(err)
	}
	ends := make(chan sandbox.Ended, 1)
	go func() {
		for e, err := range d.Ended(ctx) {
			if err == nil {
				ends <- e
			}
		}
		close(ends)
	}()
	if err := unix.Kill(d.MakerPID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e, ok := <-ends
	if !ok || e.ID != "first" || e.Cause != sandbox.CauseMakerDied {
		t.Errorf("told %+v %t", e, ok)
	}
	for range ends { // until the stream is over
	}
	if err := d.Ready(ctx); err == nil {
		t.Error("a driver without a maker says that it is ready")
	}

	// Another maker on the same directory clears up, and the same driver goes on with it.
	again, err := openDriver(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	defer again.Shutdown(context.Background())
	if err := d.Start(ctx, request("second")); err != nil {
		t.Errorf("the driver did not find the new maker: %v", err)
	}
	if all, err := again.List(ctx); err != nil || len(all) != 1 || all[0].ID != "second" {
		t.Errorf("living: %+v %v", all, err)
	}
}

func TestMakerTakesOnlyTemplatesThatRootBuilt(t *testing.T) {
	world.open(t)
	forged := &template.Template{Name: "python", Digest: "forged", Trees: []template.Tree{{Target: "/", Lower: []string{"/"}}}}
	err := world.driver.Prepare(t.Context(), tenant, forged)
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("got %v", err)
	}
	err = world.driver.Prepare(t.Context(), tenant, &template.Template{Name: "../../etc", Digest: "x"})
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("got %v", err)
	}
}

package app

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/gateway"
)

// checkReserve fails while the disk is too full for new sandboxes. Those that run are served.
func checkReserve(cfg config.Config) error {
	if total, left := diskFiles(cfg.DataDir); diskspace.CheckFiles(total, left) != nil {
		return gateway.Public(fmt.Sprintf("the disk is full of files: %d inodes of %d are free and 2 %% are kept, so nothing new is started", left, total))
	}
	free, ok := diskFree(cfg.DataDir)
	reserve := native.Reserve(int64(cfg.Storage.Reserve), diskSize(cfg.DataDir))
	if !ok || free >= reserve {
		return nil
	}
	return gateway.Public(fmt.Sprintf("the disk is full: %d MiB are free and %d are kept (storage.reserve), so nothing new is started", free>>20, reserve>>20))
}

// spaceCheck is what the server's own parts ask before they write for a tenant: the reserve that
// the maker keeps for sandboxes is not for uploads, images and logs either. Other drivers have no
// sandboxes on this disk.
func (s *Server) spaceCheck() diskspace.Check {
	if s.cfg.Driver != config.DriverNative {
		return nil
	}
	dir, asked := stateDir(s.cfg.DataDir), int64(s.cfg.Storage.Reserve)
	return func(bytes int64) error {
		if err := diskspace.CheckFiles(diskFiles(dir)); err != nil {
			return err
		}
		free, ok := diskFree(dir)
		if !ok { // then the write fails and says why
			return nil
		}
		if reserve := native.Reserve(asked, diskSize(dir)); free-bytes < reserve {
			why := fmt.Errorf("%d bytes are free, %d are asked for and %d are kept free", free, bytes, reserve)
			return fault.Wrap(fault.DiskFull, why, "the server's disk is full: it takes nothing new until there is more space")
		}
		return nil
	}
}

// checkPromises asks the maker of a running server how full the disk is and what is promised of it.
func checkPromises(ctx context.Context, cfg config.Config) []Finding {
	const name = "disk promises"
	d, err := makerDisk(ctx, cfg.DataDir)
	if err != nil || d == nil { // there is no maker, or it is not for this user to ask
		return nil
	}
	detail := fmt.Sprintf("sandboxes, volumes and snapshots have %.1f GiB and may write %.1f GiB more; %.1f GiB are free, of which %.1f are kept",
		gib(d.Used), gib(d.Promised), gib(d.Free), gib(d.Reserve))
	switch {
	case d.Free-d.Unwritten < d.Reserve:
		return []Finding{{name, "warn", detail + ": nothing new is started, and sandboxes that write may be ended", "free some space, or end sandboxes"}}
	case d.Promised > d.Free-d.Reserve:
		return []Finding{{name, "note", detail + ": not all promises can be kept at once", "watch cove_host_disk_free_bytes; storage.max_tenant_size bounds one tenant"}}
	}
	return []Finding{{name, "ok", detail, ""}}
}

// diskNote is a sentence for /readyz: how full the disk is and what is promised of it.
type diskNote struct {
	mu   sync.Mutex
	text string
}

// diskNoteWait is how long a check of readiness waits for the numbers: it has succeeded by then.
const diskNoteWait = time.Second

// after returns a check that asks for the numbers when ready has succeeded: no more often than
// readiness is checked, and not from a maker that hangs.
func (n *diskNote) after(ready func(context.Context) error, ask func(context.Context) (wire.Stats, error)) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := ready(ctx); err != nil {
			n.set("")
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, diskNoteWait)
		defer cancel()
		stats, err := ask(ctx)
		if d := stats.Disk; err == nil && d != nil {
			n.set(fmt.Sprintf("disk: %.1f GiB of %.1f GiB are free, of which %.1f are kept; %.1f GiB are promised to sandboxes, volumes and snapshots",
				gib(d.Free), gib(d.Total), gib(d.Reserve), gib(d.Promised)))
		} else {
			n.set("")
		}
		return nil
	}
}

func (n *diskNote) set(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text = text
}

func (n *diskNote) notes() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.text == "" {
		return nil
	}
	return []string{n.text}
}

func gib(bytes int64) float64 { return float64(bytes) / (1 << 30) }

func makerDisk(ctx context.Context, dataDir string) (*wire.DiskStats, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: maker.SocketPath(dataDir), Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := wire.Send(c, wire.Request{Op: wire.OpStats}); err != nil {
		return nil, err
	}
	var r wire.Response
	files, err := wire.Receive(c, &r)
	wire.CloseAll(files)
	if err != nil || r.Stats == nil {
		return nil, err
	}
	return r.Stats.Disk, r.Err()
}

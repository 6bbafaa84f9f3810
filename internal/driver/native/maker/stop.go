package maker

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/driver/native/wire"
)

// stopMain is "cove maker stop": it ends every sandbox of a data directory and the maker with them, and returns when
// they are gone. After the time limit it says what is left.
func stopMain(args []string, tag func(dataDir string) string) error {
	flags := flag.NewFlagSet("maker stop", flag.ContinueOnError)
	dataDir := flags.String("data-dir", "", "data directory of the server")
	limit := flags.Duration("timeout", 2*time.Minute, "how long to wait for the end of the sandboxes")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dataDir == "" {
		return errNoDataDir
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: SocketPath(*dataDir), Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("no maker runs for %q: %w", *dataDir, err)
	}
	defer c.Close()
	pid, process, err := peerOf(c)
	if err != nil {
		return fmt.Errorf("find the maker's process: %w", err)
	}
	defer process.Close()
	deadline := time.Now().Add(*limit)
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if err := Shutdown(ctx, c); err != nil && ctx.Err() == nil {
		return err
	}
	left := func() string { return whatIsLeft("cove-" + tag(*dataDir)) }
	if !awaitExit(process, time.Until(deadline)) {
		return fmt.Errorf("the maker (process %d) still runs after %v%s; its log is %s", pid, *limit, left(), filepath.Join(*dataDir, "maker", "log"))
	}
	if left := left(); left != "" {
		return fmt.Errorf("the maker has ended%s; start it again, which clears them away: cove maker --data-dir %s", left, *dataDir)
	}
	return nil
}

// Shutdown asks a maker to end, and returns when it has or ctx has.
func Shutdown(ctx context.Context, c *net.UnixConn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := wire.Send(c, wire.Request{Op: wire.OpShutdown}); err != nil {
		return err
	}
	var r wire.Response
	if _, err := wire.Receive(c, &r); err != nil {
		return err
	}
	if err := r.Err(); err != nil {
		return err
	}
	wire.AwaitEnd(c)
	return context.Cause(ctx)
}

// peerOf is the process at the other end of a connection.
func peerOf(c *net.UnixConn) (pid int, process *os.File, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, credErr); err != nil {
		return 0, nil, err
	}
	fd, err := unix.PidfdOpen(int(cred.Pid), 0)
	if err != nil {
		return 0, nil, err
	}
	return int(cred.Pid), os.NewFile(uintptr(fd), "maker"), nil
}

// awaitExit tells whether a process ended within a time.
func awaitExit(process *os.File, limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	for {
		fds := []unix.PollFd{{Fd: int32(process.Fd()), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(max(0, time.Until(deadline).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n > 0
		}
	}
}

// maxLeft is how many cgroups are named.
const maxLeft = 20

// whatIsLeft names the sandboxes of a maker that have processes, by their cgroups. It is empty if there
// are none, or if the caller may not see them. It changes nothing: the next maker may use the groups.
func whatIsLeft(groups string) string {
	mounts, err := cgroup.Mounts("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	found := map[string]string{} // processes by sandbox
	for _, m := range mounts {
		lists, _ := filepath.Glob(filepath.Join(m.Path, groups, "*", "cgroup.procs"))
		for _, list := range lists {
			if text, err := os.ReadFile(list); err == nil && len(text) > 0 {
				found[filepath.Base(filepath.Dir(list))] = strings.Join(strings.Fields(string(text)), " ")
			}
		}
	}
	if len(found) == 0 {
		return ""
	}
	var all []string
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if len(all) < maxLeft {
			all = append(all, fmt.Sprintf("%s/%s (processes %s)", groups, name, found[name]))
		}
	}
	return ", and processes of sandboxes are left: " + strings.Join(all, ", ")
}

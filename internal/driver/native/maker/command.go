package maker

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	ossignal "os/signal"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

var errNoDataDir = errors.New("--data-dir is needed: it is the server's, which cove config show tells")

// Main is the command "cove maker": it enters a mount namespace of its own and runs until it is told to stop.
func Main(args []string, tag func(dataDir string) string, resolver []string) error {
	if len(args) > 0 && args[0] == "stop" {
		return stopMain(args[1:], tag)
	}
	flags := flag.NewFlagSet("maker", flag.ContinueOnError)
	dataDir := flags.String("data-dir", "", "data directory of the server")
	templates := flags.String("templates", "", "where templates are built (default: templates in the data directory)")
	serverUID := flags.Int("server-uid", 0, "uid of the server, which alone may speak to the maker")
	pool := flags.Int("pool", 8, "sandboxes kept ready for each template and tenant")
	network := flags.Bool("network", true, "give sandboxes a network")
	readyFD := flags.Int("ready-fd", -1, "descriptor that is told when the maker answers")
	inside := flags.Bool("inside", false, "already in a private mount namespace")
	hostFD := flags.Int("host-mounts", -1, "descriptor of the mount namespace outside of that")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dataDir == "" {
		return errNoDataDir
	}
	if !*inside {
		// Not closed by the exec: paths of the host that a sandbox is given are found where the operator sees them.
		host, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY, 0)
		if err != nil {
			return fmt.Errorf("open mount namespace: %w", err)
		}
		return EnterPrivateMounts(append([]string{"cove", "maker", "--inside", "--host-mounts", strconv.Itoa(host)}, args...))
	}
	// Whatever whoever started us had open is not for those whom we start.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close descriptors: %w", err)
	}
	var ready, host *os.File
	if *hostFD >= 0 {
		host = os.NewFile(uintptr(*hostFD), "host mounts")
	}
	if *readyFD >= 0 {
		ready = os.NewFile(uintptr(*readyFD), "ready")
	}
	verdict := func(text string) {
		if ready != nil {
			_, _ = ready.WriteString(text)
			ready.Close()
			ready = nil
		}
	}
	ctx, stop := ossignal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	ossignal.Ignore(unix.SIGHUP, unix.SIGPIPE)
	err := Run(ctx, Config{
		DataDir: *dataDir, Templates: cmp.Or(*templates, filepath.Join(*dataDir, "templates")), Tag: tag(*dataDir), ServerUID: *serverUID, PoolSize: *pool, Network: *network, Resolver: resolver, Host: host,
		Ready: func() { verdict("ok") }, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		verdict(err.Error())
	}
	return err
}

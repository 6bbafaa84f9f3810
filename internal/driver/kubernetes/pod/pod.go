// Package pod is the program inside a Pod: PID 1 of its container, which waits with a warm interpreter until a server makes a sandbox of it,
// and is that sandbox's agent from then on. It knows no API server and trusts nobody but holders of a certificate of Cove's.
package pod

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
)

// Main runs the program and returns its exit status.
func Main(argv []string, stderr io.Writer) int {
	if status, ok := agent.Helper(argv); ok {
		return status
	}
	var err error
	switch {
	case len(argv) == 3 && argv[1] == "install":
		err = Install(argv[2])
	case len(argv) > 3 && argv[1] == "seed":
		err = Seed(argv[2:])
	case len(argv) == 2 && argv[1] == "serve":
		err = serve()
	default:
		fmt.Fprintln(stderr, "usage: cove-pod install DIR | cove-pod seed TO BYTES DIR… | cove-pod serve")
		return 2
	}
	if err != nil {
		fmt.Fprintln(stderr, "cove-pod:", err)
		return podapi.ExitFailed
	}
	return 0
}

// patience is how long a template's imports may take.
const patience = 4 * time.Minute

func serve() error {
	settings, err := podapi.DecodeSettings(os.Getenv(podapi.Variable))
	if err != nil {
		return err
	}
	runtime.GOMAXPROCS(2) // it mostly waits
	// It takes the settings out of the environment, and itself out of everybody's sight.
	if err := agent.Harden(); err != nil {
		return err
	}
	s, err := open(settings)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", cmp.Or(settings.Address, ":"+strconv.Itoa(podapi.Port)))
	if err != nil {
		return err
	}
	return s.accept(l)
}

// open makes everything ready that does not depend on whose sandbox this becomes.
func open(settings podapi.Settings) (*server, error) {
	token, err := hex.DecodeString(settings.Token)
	if err != nil || len(token) < 16 {
		return nil, fmt.Errorf("%s has no token", podapi.Variable)
	}
	config, err := podapi.PodTLS(settings.Authority)
	if err != nil {
		return nil, err
	}
	if settings.Dir == "" {
		settings.Dir = podapi.Dir
	}
	makeHome(settings)
	s := &server{settings: settings, token: token, tls: config, slots: make(chan struct{}, maxGreetings), exit: os.Exit}
	if settings.Python == "" || len(settings.Preload) == 0 {
		return s, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if s.zygote, err = startZygote(ctx, settings); err != nil {
		return nil, err
	}
	// One kernel more than anybody has asked for: whoever gets this Pod does not wait for a fork.
	if s.spare, err = s.zygote.fork(ctx, true); err != nil {
		return nil, fmt.Errorf("fork a kernel: %w", err)
	}
	go s.mourn() // until the zygote ends, or the process
	return s, nil
}

// makeHome makes the home that a volume does not have yet, for its user. Where there can be none, commands are in the root directory.
func makeHome(settings podapi.Settings) {
	if settings.Home == "" || os.MkdirAll(filepath.Dir(settings.Home), 0o755) != nil || os.Mkdir(settings.Home, 0o755) != nil {
		return
	}
	if who, err := findAccount(settings.User); os.Getuid() == 0 && err == nil {
		_ = os.Chown(settings.Home, who.uid, who.gid) // it is root's then, and readable
	}
}

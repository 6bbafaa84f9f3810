package app

import (
	"cmp"
	"log/slog"
	"net/netip"
	"syscall"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/connlimit"
)

// maxConnections is how many connections a server takes that was not told: each costs some 20 KB while it is silent.
const maxConnections = 16384

// The streams that one connection may have open over HTTP/2. A JavaScript SDK has up to 2,000 on
// the connections that it keeps; clients of Kubernetes open another connection beyond 250, as with
// the API server of Kubernetes.
const (
	maxStreams           = 2000
	maxKubernetesStreams = 250
)

// minStreams is what one address has at least: more than the runs and connections to ports of a
// tenant together. Where it may have more connections, it may have as many streams.
const minStreams = 4096

// newLimiter bounds the connections of all listeners. By default they are half of the process's descriptors, so that the
// other half is left for sandboxes, files and the database, and one address has half of them.
func newLimiter(cfg config.Config, log *slog.Logger) *connlimit.Limiter {
	total := cmp.Or(cfg.Server.MaxConnections, defaultConnections())
	share := cmp.Or(cfg.Server.MaxConnectionsPerAddress, max(1, total/2))
	return connlimit.New(connlimit.Config{
		Total: total, PerAddress: share, Trusted: trustedProxies(cfg), Stall: cfg.Server.StallTimeout,
		TotalStreams: max(2*minStreams, total), StreamsPerAddress: max(minStreams, share),
	}, log)
}

func trustedProxies(cfg config.Config) []netip.Prefix {
	trusted := make([]netip.Prefix, len(cfg.Server.TrustedProxies))
	for i, text := range cfg.Server.TrustedProxies {
		trusted[i], _ = config.ParsePrefix(text) // validated
	}
	return trusted
}

func defaultConnections() int {
	var files syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) != nil || files.Cur > 2*maxConnections {
		return maxConnections
	}
	return max(16, int(files.Cur/2))
}

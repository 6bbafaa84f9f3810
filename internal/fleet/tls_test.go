package fleet_test

import (
	"crypto/tls"
	"net"

	"github.com/covehq/cove/internal/fleet"
)

func newTLS(l net.Listener, i *fleet.Identity) net.Listener { return tls.NewListener(l, i.Server()) }

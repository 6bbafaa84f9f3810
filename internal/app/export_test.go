package app

import (
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fleet"
	"github.com/covehq/cove/internal/sandbox"
)

// shared is a driver that several servers have.
type shared struct{ sandbox.Driver }

func (shared) Close() error { return nil }

// ShareDriver has all servers that start before end use one driver, and miss each other soon: after
// ten seconds, because a server that lives can be that late with its heartbeat on a machine under
// load.
func ShareDriver() (end func() error) {
	var once sync.Once
	var driver sandbox.Driver
	before := newInproc
	newInproc = func(cfg inproc.Config) (sandbox.Driver, error) {
		var err error
		once.Do(func() { driver, err = before(cfg) })
		return shared{driver}, err
	}
	pace = fleet.Config{Every: 100 * time.Millisecond, Dead: 10 * time.Second, Look: 200 * time.Millisecond}
	return func() error {
		newInproc, pace = before, fleet.Config{}
		if driver == nil {
			return nil
		}
		return driver.Close()
	}
}

// Cut ends every connection and every listener of a server, as its end would.
func (s *Server) Cut() error { return s.eachHTTP((*http.Server).Close) }

// PeerURL is where other servers reach this one.
func (s *Server) PeerURL() string { return "https://" + s.team.listener.Addr().String() }

// Name is what this server is called among others.
func (s *Server) Name() string { return s.team.me() }

// FacadeURL is where the façade is.
func (s *Server) FacadeURL() string { return s.facade.url }

// DropPrivilege is tested in a process of its own: it cannot be undone.
var DropPrivilege = func() error { return dropPrivilege(nil) }

// ServerUID is who the server of a data directory becomes.
func ServerUID(dataDir string) int { return serverUser(dataDir).uid }

// Bar shows progress.
var Bar = bar

// SandboxConfig maps the configuration onto the domain's.
var SandboxConfig = sandboxConfig

// OwnCertificate is the certificate that a server makes for itself.
var OwnCertificate = ownCertificate

// SpaceCheck is what the parts of a server with this configuration ask before they write.
func SpaceCheck(cfg config.Config) diskspace.Check { return (&Server{cfg: cfg}).spaceCheck() }

// CheckReserve is what /readyz says of the disk.
var CheckReserve = checkReserve

// RenewMain is the child that renews templates.
var RenewMain = renewMain

package app

import (
	"crypto/tls"
	"log/slog"
	"sync"
	"time"
)

// renewAgain is how long a renewal that failed is left alone: the certificate in use is good for weeks then.
const renewAgain = time.Hour

// identity is the server's own certificate, which is made anew while it runs: a server may be up for longer than clients
// let a certificate be good.
type identity struct {
	dir, domain string
	also        []string // further hosts and addresses
	file        string   // what clients have to trust
	now         func() time.Time
	log         *slog.Logger

	mu    sync.Mutex
	pair  *tls.Certificate
	again time.Time // no renewal before
}

func openIdentity(dir, domain string, now func() time.Time, log *slog.Logger, also ...string) (*identity, error) {
	pair, file, err := ownCertificate(dir, domain, now(), also...)
	if err != nil {
		return nil, err
	}
	return &identity{dir: dir, domain: domain, also: also, file: file, now: now, log: log, pair: &pair}, nil
}

// get is the certificate for a connection. When it cannot be renewed the old one stays for as long as it is good.
func (i *identity) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	now := i.now()
	if now.Add(renewBefore).Before(i.pair.Leaf.NotAfter) || now.Before(i.again) {
		return i.pair, nil
	}
	if err := i.renew(now); err != nil {
		i.again = now.Add(renewAgain)
		i.log.Error("the server's own certificate cannot be renewed", "domain", i.domain, "until", i.pair.Leaf.NotAfter, "error", err)
	}
	return i.pair, nil
}

// renew makes a certificate that is used also when it cannot be kept; called with mu held.
func (i *identity) renew(now time.Time) error {
	ca, err := loadAuthority(i.dir, i.domain, now, i.also...)
	if err != nil {
		return err
	}
	pair, err := ca.issue(i.domain, now, i.also...)
	if err != nil {
		return err
	}
	i.pair = &pair
	if err := keepIssued(i.dir, pair); err != nil {
		i.log.Warn("the server's renewed certificate is not kept, the next start makes another", "domain", i.domain, "error", err)
	}
	i.log.Info("the server's own certificate was renewed", "domain", i.domain, "until", pair.Leaf.NotAfter)
	return nil
}

package image

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/covehq/cove/internal/fault"
)

// explain gives a failure of a registry a kind and a sentence. Content that does not have its digest, like a registry that
// cannot be reached, is fault.Unavailable: nothing about the request is wrong and another try may go well.
func explain(ctx context.Context, what string, o *source, err error) error {
	var f *fault.Error
	var digest *digestError
	switch code := status(err); {
	case err == nil, errors.As(err, &f):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errFile):
		return cmp.Or(diskFull(err), err)
	case errors.Is(err, errAddress):
		return fault.Wrap(fault.Denied, plainCause(err), "%s is at an address that this server does not talk to", what)
	case errors.Is(err, errPlain):
		return plainOnly(what, err)
	case errors.Is(err, errHandshake):
		return fault.Wrap(fault.Unavailable, err, "the registry of %s wants its callers to authenticate in a way that this server does not know or trust", what)
	case errors.As(err, &digest):
		return fault.Wrap(fault.Unavailable, err, "the registry sent a %s of %s that does not have its digest; try again", digest.what, what)
	case errors.Is(err, errTooLong):
		return fault.Wrap(fault.Unavailable, err, "the registry sent more of %s than it announced or than an image may have", what)
	case isCertificate(err): // of a registry that was then tried without TLS too, which is of no interest
		return fault.Wrap(fault.Unavailable, plainCause(err), "the registry of %s has a certificate that this server does not believe", what)
	case code == http.StatusNotFound:
		return fault.Wrap(fault.NotFound, plainCause(err), "there is no image %s in its registry", what)
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return fault.Wrap(fault.Denied, plainCause(err), "%s", denied(what, o))
	case code == http.StatusTooManyRequests:
		return fault.Wrap(fault.Unavailable, plainCause(err), "the registry of %s limits how often it is asked; log in to it or try again later", what)
	case code != 0:
		return fault.Wrap(fault.Unavailable, plainCause(err), "the registry of %s answered with status %d; try again later", what, code)
	case errors.Is(err, http.ErrSchemeMismatch):
		return plainOnly(what, err)
	}
	return fault.Wrap(fault.Unavailable, plainCause(err), "the registry of %s %s", what, unreachable(err))
}

func plainOnly(what string, err error) error {
	return fault.Wrap(fault.Denied, plainCause(err), "the registry of %s speaks plain HTTP only; the server's operator can list it in insecure_registries", what)
}

func denied(what string, o *source) string {
	if o == nil || o.creds == (credentials{}) {
		return fmt.Sprintf("the registry does not give %s to strangers: it does not exist, or a login is needed", what)
	}
	return fmt.Sprintf("the registry does not give %s to the credentials from %s: it does not exist, or they are wrong or may not read it", what, o.creds.from)
}

func isCertificate(err error) bool {
	var (
		unknown x509.UnknownAuthorityError
		wrong   x509.HostnameError
		invalid x509.CertificateInvalidError
		check   *tls.CertificateVerificationError
	)
	return errors.As(err, &unknown) || errors.As(err, &wrong) || errors.As(err, &invalid) || errors.As(err, &check)
}

// unreachable says why a registry cannot be asked, as far as its caller can do something about it.
func unreachable(err error) string {
	var lookup *net.DNSError
	switch {
	case errors.As(err, new(tls.RecordHeaderError)):
		return "does not speak HTTPS"
	case errors.As(err, &lookup) && lookup.IsNotFound:
		return "has a host name that this server cannot resolve"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "takes no connections"
	}
	return "cannot be reached; try again later"
}

// status is what a registry has answered with; 0: it has not.
func status(err error) int {
	var ours *statusError
	var theirs *transport.Error
	switch {
	case errors.As(err, &ours):
		return ours.status
	case errors.As(err, &theirs):
		return theirs.StatusCode
	}
	return 0
}

// plainCause is a failure's chain for the operator without what a secret could be in: queries of addresses, which sign
// downloads, and words of registries, which can repeat what they were sent.
func plainCause(err error) error {
	var (
		theirs *transport.Error
		at     *url.Error
	)
	switch {
	case errors.As(err, &theirs):
		e := &statusError{status: theirs.StatusCode, host: "the registry"}
		if theirs.Request != nil {
			e.host = theirs.Request.URL.Host
		}
		if len(theirs.Errors) > 0 && isCode(string(theirs.Errors[0].Code)) {
			e.code = string(theirs.Errors[0].Code)
		}
		return e
	case errors.As(err, &at):
		where := "the registry"
		if u, err := url.Parse(at.URL); err == nil {
			where = u.Host + u.Path
		}
		return fmt.Errorf("%s %s: %w", at.Op, where, at.Err)
	}
	return err
}

// diskFull says in plain words that there is no room; nil: that is not what happened.
func diskFull(err error) error {
	if fault.Is(err, fault.DiskFull) { // it says whether bytes or inodes are short
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full: the image does not fit")
	}
	return nil
}

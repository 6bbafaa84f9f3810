package router

import (
	"net/http"
	"regexp"
	"strconv"

	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/fault"
)

// The headers by which clients say what they mean. Where a sandbox is, is not for them to say: of the address and the uid that
// they send nothing is believed.
const (
	headerID        = "X-Sandbox-Id"
	headerNamespace = "X-Sandbox-Namespace"
	headerPort      = "X-Sandbox-Port"
	headerIP        = "X-Sandbox-Pod-Ip"
	headerUID       = "X-Sandbox-Uid"
)

// target is what a request is for.
type target struct {
	namespace, name string
	port            int
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// parseTarget reads the headers; what is missing has upstream's defaults.
func parseTarget(h http.Header) (t target, err error) {
	if t.name, err = one(h, headerID, ""); err != nil {
		return t, err
	}
	if t.namespace, err = one(h, headerNamespace, "default"); err != nil {
		return t, err
	}
	port, err := one(h, headerPort, strconv.Itoa(place.PortRuntime))
	if err != nil {
		return t, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case t.name == "":
		return t, fault.New(fault.Invalid, "the header X-Sandbox-ID, which names the sandbox, is missing")
	case !dnsLabel.MatchString(t.name):
		return t, fault.New(fault.Invalid, "X-Sandbox-ID %.100q is not the name of a sandbox: at most 63 of a-z, 0-9 and -", t.name)
	case !dnsLabel.MatchString(t.namespace):
		return t, fault.New(fault.Invalid, "X-Sandbox-Namespace %.100q is not the name of a namespace: at most 63 of a-z, 0-9 and -", t.namespace)
	case err != nil || n == 0:
		return t, fault.New(fault.Invalid, "X-Sandbox-Port %.20q is not a port: a number from 1 to 65535", port)
	}
	t.port = int(n)
	return t, nil
}

// one is the only value of a header: of two, others on the way might read the other one.
func one(h http.Header, name, missing string) (string, error) {
	switch values := h.Values(name); {
	case len(values) > 1:
		return "", fault.New(fault.Invalid, "there is more than one %s", name)
	case len(values) == 1 && values[0] != "":
		return values[0], nil
	}
	return missing, nil
}

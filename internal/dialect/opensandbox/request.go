package opensandbox

import (
	"bytes"
	"encoding/json"
	"net/http"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// CreateRequest is the body of a create.
type CreateRequest struct {
	Image            *ImageSpec         `json:"image"`
	SnapshotID       string             `json:"snapshotId"`
	TemplateID       string             `json:"templateId"`
	Platform         *access.Platform   `json:"platform"`
	Timeout          *int64             `json:"timeout"` // seconds; absent: it lives until it is ended
	ResourceLimits   map[string]string  `json:"resourceLimits"`
	ResourceRequests map[string]string  `json:"resourceRequests"`
	Env              map[string]*string `json:"env"` // null: as if it were not there
	Metadata         map[string]string  `json:"metadata"`
	Entrypoint       []string           `json:"entrypoint"`
	NetworkPolicy    json.RawMessage    `json:"networkPolicy"`
	CredentialProxy  *struct {
		Enabled bool `json:"enabled"`
	} `json:"credentialProxy"`
	SecureAccess bool              `json:"secureAccess"`
	Volumes      []Volume          `json:"volumes"`
	Extensions   map[string]string `json:"extensions"`
	Lifecycle    json.RawMessage   `json:"lifecycle"`
}

// ImageSpec is an image and who pulls it.
type ImageSpec struct {
	URI  string `json:"uri"`
	Auth *struct {
		Username string `json:"username"`
		Password string `json:"password"`
	} `json:"auth"`
}

// plan is a create in the domain's words, but for its template, which may have to be pulled first.
type plan struct {
	spec    sandbox.Spec
	facts   access.Facts
	pull    template.PullRequest // of an image
	given   bool                 // somebody named an entrypoint
	hook    *Hook                // runs before that; nil: none
	volumes []wanted
}

// maxTimeout is longer than anybody means, and fits into a time.Duration.
const maxTimeout = 100 * 365 * 24 * 3600

// plan reads a create; most is what a sandbox may have at most.
func (req *CreateRequest) plan(most template.Limits) (plan, error) {
	if err := req.check(); err != nil {
		return plan{}, err
	}
	limits, err := parseResources(req.ResourceLimits, most)
	if err != nil {
		return plan{}, err
	}
	if _, err := parseResources(req.ResourceRequests, template.Limits{}); err != nil {
		return plan{}, err
	}
	if err := checkLabels(req.Metadata); err != nil {
		return plan{}, err
	}
	pl := plan{facts: access.Facts{SnapshotID: req.SnapshotID, Entrypoint: req.Entrypoint, Platform: req.Platform, Extensions: req.Extensions, Secure: req.SecureAccess}}
	pl.given = len(req.Entrypoint) > 0
	if !pl.given {
		pl.facts.Entrypoint = access.Idle()
	}
	if req.Image != nil {
		pl.facts.Image = req.Image.URI
		pl.pull = req.Image.pull()
	}
	if pl.facts.Renew, err = parseRenew(req.Extensions); err != nil {
		return plan{}, err
	}
	pl.spec = sandbox.Spec{
		ID: sandbox.NewID(), Lifetime: req.lifetime(), IdleTimeout: -1, // OpenSandbox knows no idle clock
		Limits: limits, Metadata: req.Metadata, Env: req.env(),
	}
	if pl.hook, err = parseHooks(req.Lifecycle); err != nil {
		return plan{}, err
	}
	if err := pl.network(req.NetworkPolicy); err != nil {
		return plan{}, err
	}
	if pl.spec.Mounts, pl.volumes, err = parseVolumes(req.Volumes); err != nil {
		return plan{}, err
	}
	return pl, nil
}

// check refuses what contradicts itself and what is not served.
func (req *CreateRequest) check() error {
	switch {
	case req.Extensions["poolRef"] != "":
		return told(http.StatusBadRequest, codePool, "pools are not served here; a sandbox starts in milliseconds without one: leave out poolRef")
	case req.TemplateID != "":
		return told(http.StatusBadRequest, codeUnsupported, "templateId is not served here; use image, which may also name a template of this server")
	case (req.Image == nil) == (req.SnapshotID == ""):
		return invalid("a create needs either image or snapshotId")
	case req.Image != nil && strings.TrimSpace(req.Image.URI) == "":
		return invalid("image.uri is missing")
	case req.Image != nil && len(req.Entrypoint) == 0:
		return told(http.StatusBadRequest, codeEntrypoint, "a create from an image needs an entrypoint, such as [\"tail\", \"-f\", \"/dev/null\"]")
	case len(req.Entrypoint) > 0 && req.Entrypoint[0] == "":
		return told(http.StatusBadRequest, codeEntrypoint, "the entrypoint names no program")
	case req.Timeout != nil && (*req.Timeout < 1 || *req.Timeout > maxTimeout):
		return invalid("timeout: want seconds, 1 or more; leave it out for a sandbox that lives until it is ended")
	case req.CredentialProxy != nil && req.CredentialProxy.Enabled:
		return told(http.StatusBadRequest, codeUnsupported, "the credential proxy is not served here yet; leave out credentialProxy")
	}
	return checkPlatform(req.Platform)
}

// given reports whether an optional object says anything.
func given(raw json.RawMessage) bool {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return len(bytes.TrimSpace(raw)) > 0
	}
	for _, v := range fields {
		if !empty(v) {
			return true
		}
	}
	return false
}

// empty is a value that says nothing.
func empty(raw json.RawMessage) bool {
	text := string(bytes.TrimSpace(raw))
	return text == "" || text == "null" || text == "[]" || text == "{}"
}

func checkPlatform(p *access.Platform) error {
	if p == nil || p.OS == "linux" && p.Arch == runtime.GOARCH {
		return nil
	}
	return invalid("platform %.20s/%.20s: this server runs linux/%s only", p.OS, p.Arch, runtime.GOARCH)
}

func (i *ImageSpec) pull() template.PullRequest {
	r := template.PullRequest{Reference: i.URI}
	if i.Auth != nil {
		r.Username, r.Password = i.Auth.Username, i.Auth.Password
	}
	return r
}

// lifetime is the domain's: negative is none.
func (req *CreateRequest) lifetime() time.Duration {
	if req.Timeout == nil {
		return -1
	}
	return time.Duration(*req.Timeout) * time.Second
}

func (req *CreateRequest) env() map[string]string {
	env := map[string]string{}
	for k, v := range req.Env {
		if v != nil {
			env[k] = *v
		}
	}
	return env
}

// network reads what may leave. An empty policy at a create is none.
func (pl *plan) network(raw json.RawMessage) error {
	if !given(raw) {
		return nil
	}
	var p access.Policy
	if raw[0] != '{' {
		return invalid("networkPolicy is not a JSON object")
	}
	if err := transfer.Decode(raw, &p); err != nil {
		return invalid("networkPolicy: %s", fault.Message(err))
	}
	p.Normalise()
	n, narrows, err := p.Network()
	if err != nil {
		return as(codeInvalid, err)
	}
	pl.facts.Policy, pl.spec.Network, pl.spec.NarrowNetwork = &p, &n, narrows
	return nil
}

// The bounds of the extension by which a use of a port lets a sandbox live on.
const (
	renewKey   = "access.renew.extend.seconds"
	leastRenew = 300
	mostRenew  = 86400
)

func parseRenew(extensions map[string]string) (int, error) {
	text, ok := extensions[renewKey]
	if !ok {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < leastRenew || n > mostRenew {
		return 0, invalid("extension %s=%.40q: want an integer from %d to %d", renewKey, text, leastRenew, mostRenew)
	}
	return n, nil
}

// Labels are those of Kubernetes: an optional domain and a slash, then a name.
var (
	labelName   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	labelDomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
)

const reserved = "opensandbox.io"

func checkLabels(metadata map[string]string) error {
	for k, v := range metadata {
		if err := checkLabel(k, v); err != nil {
			return err
		}
	}
	return nil
}

func checkLabel(key, value string) error {
	bad := func(format string, args ...any) error {
		return told(http.StatusBadRequest, codeLabel, format, args...)
	}
	name := key
	if domain, rest, ok := strings.Cut(key, "/"); ok {
		if len(domain) > 253 || !labelDomain.MatchString(domain) {
			return bad("metadata key %.80q: what stands before the slash is not a domain name", key)
		}
		if domain == reserved || strings.HasSuffix(domain, "."+reserved) {
			return bad("metadata key %.80q: keys below %s/ are reserved", key, reserved)
		}
		name = rest
	}
	switch {
	case !labelName.MatchString(name):
		return bad("metadata key %.80q: use up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends", key)
	case value != "" && !labelName.MatchString(value):
		return bad("the value of metadata key %.80q: use up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends", key)
	}
	return nil
}

package e2b

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"regexp"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// How long a sandbox lives when nobody says.
const (
	timeoutV1 = 15
	timeoutV2 = 300
)

// The environment variables in which a sandbox finds that it is one, which one, and what it was made from.
const (
	sandboxVariable  = "E2B_SANDBOX"
	idVariable       = "E2B_SANDBOX_ID"
	templateVariable = "E2B_TEMPLATE_ID"
)

// leastResumed is for how long traffic that resumes a sandbox lets it live, at least.
const leastResumed = 300 * time.Second

// NewSandbox is the body of a create.
type NewSandbox struct {
	TemplateID      string            `json:"templateID"`
	Timeout         *int32            `json:"timeout"`
	AutoPause       bool              `json:"autoPause"`
	AutoPauseMemory *bool             `json:"autoPauseMemory"`
	AutoResume      *AutoResume       `json:"autoResume"`
	Secure          *bool             `json:"secure"`
	Internet        *bool             `json:"allow_internet_access"`
	Network         json.RawMessage   `json:"network"`
	Metadata        map[string]string `json:"metadata"`
	EnvVars         map[string]string `json:"envVars"`
	MCP             json.RawMessage   `json:"mcp"`
	IAM             *Identity         `json:"iam"`
	VolumeMounts    []json.RawMessage `json:"volumeMounts"`
}

// AutoResume says whether traffic resumes a paused sandbox.
type AutoResume struct {
	Enabled bool `json:"enabled"`
}

// Identity is what a sandbox may prove about itself, which is not served.
type Identity struct {
	Tokens map[string]json.RawMessage `json:"tokens"`
}

func (a *API) createV1(c *call) error { return a.create(c, timeoutV1, a.cfg.OpenSandboxes) }

func (a *API) createV2(c *call) error { return a.create(c, timeoutV2, false) }

// create makes a sandbox. It has a token unless the caller says secure: false where mayBeOpen.
//
// Elsewhere secure: false makes a sandbox with a token all the same and is not refused: SDKs for Python from 1.5 until 2.0
// send it in every create, and use the token that they are answered.
func (a *API) create(c *call, timeout int32, mayBeOpen bool) error {
	var req NewSandbox
	if err := c.decode(&req); err != nil {
		return err
	}
	if !mayBeOpen {
		req.Secure = nil
	}
	if req.Timeout == nil {
		req.Timeout = &timeout
	}
	key, err := idempotency(c.r.Header)
	if err != nil {
		return err
	}
	if err := req.check(a.longest()); err != nil {
		return err
	}
	from, err := a.Resolve(c.ctx(), c.who, req.TemplateID)
	if err != nil {
		return err
	}
	var sb sandbox.Sandbox
	var made bool
	for {
		spec, err := req.spec(from)
		if err != nil {
			return err
		}
		spec.IdempotencyKey = key
		sb, made, err = a.sandboxes.Create(c.ctx(), c.who, spec)
		if err == nil {
			break
		}
		now, replaced := a.replaced(c, req.TemplateID, from, err)
		if !replaced {
			return mismatch(err, key)
		}
		from = now
	}
	if made {
		if err := a.furnish(c, sb.ID, from.ID, from.Start); err != nil {
			return err
		}
	}

	return a.answerSandbox(c, http.StatusCreated, sb)
}

// replaced looks a template's name up again if a create from it found nothing: a build of the same name may have ended since
// and removed the earlier build's files.
func (a *API) replaced(c *call, ref string, from build.Resolved, err error) (now build.Resolved, ok bool) {
	if !fault.Is(err, fault.NotFound) {
		return now, false
	}
	now, err = a.Resolve(c.ctx(), c.who, ref)
	return now, err == nil && now.Template != from.Template
}

// furnish puts into a new sandbox what E2B's guest finds in its own, and starts what its template starts.
func (a *API) furnish(c *call, id, template string, start *build.Start) error {
	a.tell(c, id, template)
	if start == nil {
		return nil
	}
	return a.begin(c, id, *start)
}

var idempotencyForm = regexp.MustCompile(`^[a-z0-9-]{1,255}$`)

func idempotency(h http.Header) (string, error) {
	key := h.Get("Idempotency-Key")
	if key != "" && !idempotencyForm.MatchString(key) {
		return "", fault.New(fault.Invalid, "Idempotency-Key: use 1 to 255 lowercase letters, digits and hyphens")
	}
	return key, nil
}

// mismatch is the conflict of a create: its key was used for another request.
func mismatch(err error, key string) error {
	if key == "" || !fault.Is(err, fault.Conflict) {
		return err
	}
	return &exact{problem{http.StatusUnprocessableEntity, fault.Message(err), "idempotency_request_mismatch"}, err}
}

// check refuses what contradicts itself and what is not served.
func (req *NewSandbox) check(longest time.Duration) error {
	resumes := req.AutoResume != nil && req.AutoResume.Enabled
	switch {
	case req.TemplateID == "":
		return fault.New(fault.Invalid, "templateID is missing")
	case *req.Timeout <= 0:
		return fault.New(fault.Invalid, "Timeout must be greater than 0")
	case time.Duration(*req.Timeout)*time.Second > longest:
		return fault.New(fault.Invalid, "Timeout cannot be greater than %d seconds", int64(longest.Seconds()))
	case req.cold() && !req.AutoPause:
		return fault.New(fault.Invalid, "autoPauseMemory: false needs autoPause: true")
	case req.cold() && resumes:
		return fault.New(fault.Invalid, "autoPauseMemory: false cannot be combined with autoResume: what keeps only its files is never resumed by traffic")
	case given(req.MCP):
		return fault.New(fault.Unsupported, "the MCP gateway is not served here yet; leave out mcp")
	case req.IAM != nil && len(req.IAM.Tokens) > 0:
		return fault.New(fault.Unsupported, "workload identity is not served here yet; leave out iam")
	case len(req.VolumeMounts) > 0:
		return fault.New(fault.Unsupported, "volumes are not served here yet; leave out volumeMounts")
	}
	return nil
}

// secured reports whether the sandbox is to have a token, as every one has whose caller does not refuse it.
func (req *NewSandbox) secured() bool { return req.Secure == nil || *req.Secure }

func (req *NewSandbox) cold() bool { return req.AutoPauseMemory != nil && !*req.AutoPauseMemory }

// given reports whether an optional object says anything.
func given(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null")) && !bytes.Equal(raw, []byte("{}"))
}

// spec says a create in the domain's words.
func (req *NewSandbox) spec(from build.Resolved) (sandbox.Spec, error) {
	network, err := ParseNetwork(req.Network)
	if err != nil {
		return sandbox.Spec{}, err
	}
	if network.private() && !req.secured() {
		return sandbox.Spec{}, fault.New(fault.Invalid, "allowPublicTraffic: false needs secure: true")
	}
	policy, err := network.Policy(req.Internet)
	if err != nil {
		return sandbox.Spec{}, err
	}
	lifetime := time.Duration(*req.Timeout) * time.Second
	spec := sandbox.Spec{
		Template: from.Template, Lifetime: lifetime, IdleTimeout: -1, // E2B knows no idle clock
		Limits: from.Limits, Metadata: req.Metadata, Env: req.env(from), IDEnv: idVariable, Network: policy,
		NarrowNetwork: narrows(policy), Annotations: annotations(req.options(from, network)),
	}
	if req.AutoPause {
		spec.DeadlineAction, spec.ColdPause = sandbox.IdlePause, req.cold()
	}
	if req.AutoResume != nil && req.AutoResume.Enabled {
		spec.AutoResume, spec.ResumeLifetime = true, max(lifetime, leastResumed)
	}
	return spec, nil
}

// env is what every process of the sandbox finds; the caller's word is last.
func (req *NewSandbox) env(from build.Resolved) map[string]string {
	env := maps.Clone(from.Env)
	if env == nil {
		env = map[string]string{}
	}
	env[sandboxVariable], env[templateVariable] = "true", from.ID
	maps.Copy(env, req.EnvVars)
	return env
}

// templateAnnotation is the name under which a sandbox's template is kept with it once more, for a listing to choose by.
const templateAnnotation = "e2b-template"

func annotations(o target.Options) map[string]string {
	return map[string]string{target.Annotation: o.Encode(), templateAnnotation: o.TemplateID}
}

func (req *NewSandbox) options(from build.Resolved, n Network) target.Options {
	return target.Options{
		TemplateID: cmp.Or(from.ID, req.TemplateID), Alias: from.Alias, Secure: req.secured(), Timeout: int(*req.Timeout),
		AutoPause: req.AutoPause, AutoPauseMemory: req.AutoPause && !req.cold(), AutoResume: req.AutoResume != nil && req.AutoResume.Enabled,
		Internet: req.Internet, Network: n.shown(), PrivateTraffic: n.private(), MaskHost: n.MaskRequestHost,
	}
}

// Resolve finds what a templateID means: a template, or a snapshot of a sandbox.
func (a *API) Resolve(ctx context.Context, who auth.Principal, ref string) (build.Resolved, error) {
	if unnamed(ref) {
		if from, err := a.snapshotAsTemplate(ctx, who, ref); !fault.Is(err, fault.NotFound) {
			return from, err
		}
	}
	from, err := a.builder.Resolve(ctx, who, ref)
	if !fault.Is(err, fault.NotFound) {
		return from, err
	}
	if from, err := a.snapshotAsTemplate(ctx, who, ref); !fault.Is(err, fault.NotFound) {
		return from, err
	}
	return from, err
}

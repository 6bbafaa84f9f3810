package agentsandbox

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// adopt makes the Sandbox of a claim, unless the claim cannot have one.
func (p *pass) adopt(spec claimSpec) (again time.Duration, ok bool) {
	name, reason := p.templateName(spec)
	if name == "" {
		return p.fail(reason, "%s", p.missing(spec)), false
	}
	t := p.find(p.key.tenant, templateKind, p.key.namespace, name)
	if t == nil {
		return p.fail(whyNoTemplate, "SandboxTemplate %q not found in namespace %q; there are %s", name, p.key.namespace, p.known()), false
	}
	body, reason, err := blueprintOf(p.claim, spec, t)
	if err != nil {
		return p.fail(reason, "%s", fault.Message(err)), false
	}
	o := &object{kind: sandboxKind, version: beta, id: sandbox.NewID(), body: fields{
		"metadata": fields{
			"name": p.key.name, "namespace": p.key.namespace, "uid": newUID(), "generation": 1, "creationTimestamp": formatTime(time.Now()),
			"labels": any(boxLabels(p.claim, name)), "ownerReferences": []any{ownerReference(p.claim)},
		},
		"spec": body,
	}}
	o.network, _ = networkOf(t, p.opens(p.key.tenant))
	o.setMeta("annotations", any(boxAnnotations(p.claim, o, name)))
	o.set("status", boxStatus(o, false, pending(messagePending)...))
	if p.box, err = p.realm.create(p.ctx, o); err != nil {
		p.box = nil
		return p.later(err), false
	}
	return 0, true
}

// templateName is the template that a claim is for, by its own name or that of a pool.
func (p *pass) templateName(spec claimSpec) (name, reason string) {
	if spec.WarmPoolRef != nil {
		return p.templateOf(p.key.tenant, p.key.namespace, spec.WarmPoolRef.Name), whyNoPool
	}
	if spec.WarmPool != "" && spec.WarmPool != "default" && spec.WarmPool != "none" {
		if p.templateOf(p.key.tenant, p.key.namespace, spec.WarmPool) == "" {
			return "", whyNoPool
		}
	}
	return spec.TemplateRef.Name, whyNoTemplate
}

func (p *pass) missing(spec claimSpec) string {
	pool := spec.WarmPool
	if spec.WarmPoolRef != nil {
		pool = spec.WarmPoolRef.Name
	}
	return "SandboxWarmPool " + quoted(pool) + " not found in namespace " + quoted(p.key.namespace) + "; there are " + p.known()
}

// known are the names that would have been right.
func (p *pass) known() string {
	templates, _ := p.all(p.key.tenant, templateKind, p.key.namespace)
	var names []string
	for _, o := range templates[:min(len(templates), 20)] {
		names = append(names, o.name())
	}
	return strings.Join(names, ", ")
}

func quoted(s string) string { return encode(s) }

func boxLabels(claim *object, template string) fields {
	labels := fields{
		labelClaimUID: claim.uid(), labelTemplateHash: hash(template), labelLaunchType: "warm", labelCreatedBy: "controller",
	}
	if by := text(claim.labels(), labelCreatedBy); by != "" {
		labels[labelCreatedBy] = by
	}
	return labels
}

func boxAnnotations(claim, box *object, template string) fields {
	f := fields{annotationPodName: box.name(), annotationTemplate: template, annotationID: box.id}
	if trace := text(claim.annotations(), annotationTrace); trace != "" {
		f[annotationTrace] = trace
	}
	return f
}

// blueprintOf is the spec of a claim's Sandbox: the template's, with what the claim adds and may add.
func blueprintOf(claim *object, spec claimSpec, t *object) (body fields, reason string, err error) {
	rules := readSpec[templateSpec](t)
	first, err := rules.first()
	if err != nil {
		return nil, whyReconciler, err
	}
	if err := checkPodMetadata(spec.PodMetadata, rules.PodTemplate.Metadata); err != nil {
		return nil, whyMetadata, err
	}
	if len(spec.Volumes) > 0 || len(rules.Volumes) > 0 {
		return nil, whyVolumes, fault.New(fault.Unsupported, "volumeClaimTemplates are not served here: sandboxes have no volumes that outlive them")
	}
	if err := checkEnv(spec.Env, first, rules.EnvPolicy); err != nil {
		return nil, whyEnv, err
	}
	pod := deepFields(inner(t.spec(), "podTemplate"))
	addMetadata(pod, spec.PodMetadata)
	if all := list(pod, "spec", "containers"); len(all) > 0 {
		if f, ok := all[0].(fields); ok {
			addEnv(f, spec.Env)
		}
	}
	return fields{"podTemplate": pod, "operatingMode": modeRunning}, "", nil
}

func addMetadata(pod fields, add podMetadata) {
	meta := maps.Clone(inner(pod, "metadata"))
	if meta == nil {
		meta = fields{}
	}
	for name, pairs := range map[string]map[string]string{"labels": add.Labels, "annotations": add.Annotations} {
		for k, v := range pairs {
			meta[name] = any(with(inner(meta, name), k, v))
		}
	}
	if len(meta) > 0 {
		pod["metadata"] = meta
	}
}

// addEnv puts variables of a claim beside those of the template, in the place of those of the same name.
func addEnv(container fields, add []envVariable) {
	if len(add) == 0 {
		return
	}
	env := slices.Clone(list(container, "env"))
	for _, e := range add {
		env = slices.DeleteFunc(env, func(v any) bool { f, ok := v.(fields); return ok && f["name"] == e.Name })
		env = append(env, fields{"name": e.Name, "value": e.Value})
	}
	container["env"] = env
}

// checkEnv keeps a claim to what its template lets it set.
func checkEnv(env []envVariable, first container, policy string) error {
	if len(env) == 0 {
		return nil
	}
	switch policy {
	case injectOverride:
	case injectNew:
		if len(first.EnvFrom) > 0 {
			return fault.New(fault.Denied, "the template's container takes its environment from elsewhere (envFrom), so a claim may add none")
		}
		for _, e := range env {
			if slices.ContainsFunc(first.Env, func(has envVariable) bool { return has.Name == e.Name }) {
				return fault.New(fault.Denied, "the template sets environment variable %.80q, and a claim may not change it", e.Name)
			}
		}
	default:
		return fault.New(fault.Denied, "the template lets claims set no environment variables (envVarsInjectionPolicy)")
	}
	for _, e := range env {
		if e.From != nil {
			return fault.New(fault.Unsupported, "environment variable %.80q: valueFrom is not served here; give its value", e.Name)
		}
		if e.Container != "" && e.Container != first.Name {
			return fault.New(fault.Unsupported, "environment variable %.80q is for container %.80q; only the first, %q, is run here", e.Name, e.Container, first.Name)
		}
	}
	return nil
}

// freeDomain is whose labels claims may put on Pods.
const freeDomain = "sandbox.users.io"

// checkPodMetadata keeps a claim to labels and annotations that mean nothing to anybody else.
func checkPodMetadata(add, has podMetadata) error {
	for k, v := range add.Labels {
		domain, _, _ := strings.Cut(k, "/")
		if _, why := wrongLabel(k, v); why != "" {
			return fault.New(fault.Invalid, "label %.80q: %s", k, why)
		}
		if domain != freeDomain && !strings.HasSuffix(domain, "."+freeDomain) || domain == k {
			return fault.New(fault.Denied, "label %.80q: a claim may add labels of %s and below alone", k, freeDomain)
		}
		if old, set := has.Labels[k]; set && old != v {
			return fault.New(fault.Denied, "label %.80q is set by the template, and a claim may not change it", k)
		}
	}
	for k, v := range add.Annotations {
		domain, _, qualified := strings.Cut(k, "/")
		if !isQualified(strings.ToLower(k)) {
			return fault.New(fault.Invalid, "annotation %.80q is not a name", k)
		}
		if qualified && k != "cluster-autoscaler.kubernetes.io/safe-to-evict" {
			for _, taken := range []string{"kubernetes.io", "k8s.io", "agents.x-k8s.io"} {
				if domain == taken || strings.HasSuffix(domain, "."+taken) {
					return fault.New(fault.Denied, "annotation %.80q: a claim may add none of %s", k, taken)
				}
			}
		}
		if old, set := has.Annotations[k]; set && old != v {
			return fault.New(fault.Denied, "annotation %.80q is set by the template, and a claim may not change it", k)
		}
	}
	return nil
}

// start makes the sandbox of a Sandbox that has none yet.
func (p *pass) start(spec sandboxSpec) time.Duration {
	if spec.suspended() {
		return p.say(false, suspended(messageSuspended))
	}
	first, err := spec.first()
	if err != nil {
		return p.cannot(err)
	}
	s, err := p.specOf(spec, first)
	if err != nil {
		return p.cannot(err)
	}
	t, err := p.images.Ensure(p.ctx, p.key.tenant, template.PullRequest{Reference: first.Image})
	if err != nil {
		return p.cannot(err)
	}
	s.Template = t.Name
	sb, _, err := p.sandboxes.Create(p.ctx, p.who, s)
	if err != nil {
		p.rename()
		return p.cannot(err)
	}
	if o := p.realm.get(sandboxKind, p.key.namespace, p.key.name); o == nil || o.uid() != p.box.uid() { // deleted at the very last
		p.end(p.key.tenant, sb.ID)
		p.box = nil
		return never
	}
	return p.prepare()
}

// rename gives the next attempt an id of its own: the domain remembers the one that failed.
func (p *pass) rename() {
	p.box = p.shown(func(o *object) *object {
		c := o.change()
		c.id = sandbox.NewID()
		c.setMeta("annotations", any(with(c.annotations(), annotationID, c.id)))
		return c
	})
}

// specOf is a Sandbox in the words of the domain.
func (p *pass) specOf(spec sandboxSpec, first container) (sandbox.Spec, error) {
	if len(spec.Volumes) > 0 {
		return sandbox.Spec{}, fault.New(fault.Unsupported, "volumeClaimTemplates are not served here: sandboxes have no volumes that outlive them")
	}
	limits, err := parseLimits(first.Resources.Limits)
	if err != nil {
		return sandbox.Spec{}, err
	}
	env := map[string]string{}
	for _, e := range first.Env {
		if e.From != nil {
			return sandbox.Spec{}, fault.New(fault.Unsupported, "environment variable %.80q: valueFrom is not served here; give its value", e.Name)
		}
		env[e.Name] = e.Value
	}
	note, err := json.Marshal(facts{p.key.namespace, p.key.name, p.box.uid()})
	if err != nil {
		return sandbox.Spec{}, err
	}
	return sandbox.Spec{
		ID: p.box.id, Lifetime: p.lifetime(spec), Limits: limits, Env: env, Network: p.box.network, NarrowNetwork: true,
		Metadata:    map[string]string{"agents.x-k8s.io/namespace": p.key.namespace, "agents.x-k8s.io/name": p.key.name},
		Annotations: map[string]string{Annotation: string(note), imageAnnotation: first.Image},
	}, nil
}

// lifetime is how long the sandbox may live from now on; negative: as long as it likes.
func (p *pass) lifetime(spec sandboxSpec) time.Duration {
	until := spec.ShutdownTime
	if p.claim != nil {
		if t := readSpec[claimSpec](p.claim).Lifecycle.ShutdownTime; t != nil && (until == nil || t.Before(*until)) {
			until = t
		}
	}
	most := p.cfg.MaxLifetime
	switch {
	case until == nil && most == 0:
		return -1
	case until == nil:
		return most
	}
	left := max(time.Until(*until), time.Second)
	if most > 0 {
		left = min(left, most)
	}
	return left
}

// cannot says why there is no sandbox: what another attempt may change is tried again.
func (p *pass) cannot(err error) time.Duration {
	if p.ctx.Err() != nil {
		return never // whoever interrupted it has woken it
	}
	switch fault.KindOf(err) {
	case fault.Exhausted, fault.DiskFull, fault.Unavailable, fault.Timeout, fault.Conflict, fault.Gone, fault.Internal:
		return p.later(err)
	case fault.Invalid, fault.Denied, fault.Unauthed, fault.NotFound, fault.Unsupported:
	}
	p.say(false, []condition{{"Ready", whyReconciler, fault.Message(err), false}, {"Suspended", whyNotSuspended, "", false}})
	return missingAgain
}

package agentsandbox

import "strings"

// An object is kept in the words of the version in which it was last written. Whoever reads it in the other gets it translated,
// and whoever writes that back unchanged changes nothing.

const (
	// shadowPrefix begins the name of a pool that stands for a template in the newer version.
	shadowPrefix = "shadow-pool-"
	// volumePolicyAnnotation carries a field that the older version does not have.
	volumePolicyAnnotation = "api.agents.x-k8s.io/v1beta1-volume-claim-templates-policy"
)

// view is an object in the words of a version. templateOf tells which template a pool is of.
func (o *object) view(version string, templateOf func(pool string) string) fields {
	f := with(o.body, "apiVersion", o.kind.apiVersion(version))
	f["kind"] = o.kind.name
	if spec, ok := f["spec"]; ok && o.version != version {
		if s, isObject := spec.(fields); isObject {
			f["spec"] = convertSpec(o.kind, s, version, templateOf)
		}
		if o.kind == templateKind {
			f["metadata"] = convertTemplateMeta(o, version)
		}
	}
	if o.kind == templateKind && o.version != version && version == beta {
		if policy := text(o.annotations(), volumePolicyAnnotation); policy != "" {
			f["spec"] = with(inner(f, "spec"), "volumeClaimTemplatesPolicy", policy)
		}
	}
	if version == alpha {
		if s := o.status(); s != nil {
			f["status"] = alphaStatus(o, s)
		}
	}
	return f
}

func convertSpec(k *kind, spec fields, version string, templateOf func(string) string) fields {
	switch {
	case k == claimKind && version == beta:
		pool := text(spec, "warmpool")
		if pool == "" || pool == "default" || pool == "none" {
			pool = shadowPrefix + text(spec, "sandboxTemplateRef", "name")
		}
		return with(without(spec, "sandboxTemplateRef", "warmpool"), "warmPoolRef", any(fields{"name": pool}))
	case k == claimKind:
		pool := text(spec, "warmPoolRef", "name")
		s := without(spec, "warmPoolRef", "volumeClaimTemplates")
		if template, shadow := strings.CutPrefix(pool, shadowPrefix); shadow {
			return with(s, "sandboxTemplateRef", any(fields{"name": template}))
		}
		s["sandboxTemplateRef"], s["warmpool"] = fields{"name": templateOf(pool)}, pool
		return s
	case k == sandboxKind && version == beta:
		mode := modeRunning
		if n, ok := spec["replicas"]; ok && number(n) == 0 {
			mode = modeSuspended
		}
		return with(without(spec, "replicas"), "operatingMode", mode)
	case k == sandboxKind:
		replicas := 1
		if text(spec, "operatingMode") == modeSuspended {
			replicas = 0
		}
		return with(without(spec, "operatingMode"), "replicas", replicas)
	case k == templateKind && version == alpha:
		return without(spec, "volumeClaimTemplatesPolicy")
	}
	return spec
}

func convertTemplateMeta(o *object, version string) fields {
	annotations := o.annotations()
	if version == beta {
		annotations = without(annotations, volumePolicyAnnotation)
	} else if policy := text(o.spec(), "volumeClaimTemplatesPolicy"); policy != "" {
		annotations = with(annotations, volumePolicyAnnotation, policy)
	}
	if len(annotations) == 0 {
		return with(o.meta(), "annotations", nil)
	}
	return with(o.meta(), "annotations", any(annotations))
}

// alphaStatus leaves out what the older version does not know.
func alphaStatus(o *object, s fields) fields {
	switch o.kind {
	case sandboxKind:
		var kept []any
		for _, c := range list(s, "conditions") {
			if f, ok := c.(fields); !ok || f["type"] != "PodScheduled" {
				kept = append(kept, c)
			}
		}
		replicas := 0
		if len(list(s, "podIPs")) > 0 {
			replicas = 1
		}
		s = with(without(s, "nodeName"), "replicas", replicas)
		if kept != nil {
			s["conditions"] = kept
		}
	case poolKind:
		s = without(s, "observedGeneration")
	}
	return s
}

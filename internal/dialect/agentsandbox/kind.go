package agentsandbox

import "slices"

// The groups and versions of the API; the first version is what clients get that do not choose.
const (
	coreGroup       = "agents.x-k8s.io"
	extensionsGroup = "extensions.agents.x-k8s.io"
	beta            = "v1beta1"
	alpha           = "v1alpha1"
)

var versions = []string{beta, alpha}

// kind is one of the kinds of objects that are kept.
type kind struct {
	group, resource, name, short string
	singular                     string
	hasStatus                    bool
	scales                       []string // versions that have /scale
	label                        bool     // names are DNS labels, because they become names of hosts
	columns                      []column
}

var (
	sandboxKind = &kind{
		group: coreGroup, resource: "sandboxes", singular: "sandbox", name: "Sandbox", hasStatus: true, scales: []string{alpha}, label: true,
		columns: []column{readyColumn, reasonColumn, ageColumn},
	}
	claimKind = &kind{
		group: extensionsGroup, resource: "sandboxclaims", singular: "sandboxclaim", name: "SandboxClaim", hasStatus: true, label: true,
		columns: []column{readyColumn, {"Sandbox", "string", func(o *object) any { return text(o.status(), "sandbox", "name") }}, reasonColumn, ageColumn},
	}
	templateKind = &kind{
		group: extensionsGroup, resource: "sandboxtemplates", singular: "sandboxtemplate", name: "SandboxTemplate",
		columns: []column{ageColumn},
	}
	poolKind = &kind{
		group: extensionsGroup, resource: "sandboxwarmpools", singular: "sandboxwarmpool", name: "SandboxWarmPool", short: "swp", hasStatus: true, scales: versions,
		columns: []column{
			{"Ready", "integer", func(o *object) any { return number(o.status()["readyReplicas"]) }},
			{"Desired", "integer", func(o *object) any { return o.replicas() }},
			ageColumn,
		},
	}
	kinds = []*kind{sandboxKind, claimKind, templateKind, poolKind}
)

// kindOf finds a kind by the words of a path.
func kindOf(group, version, resource string) *kind {
	if !slices.Contains(versions, version) {
		return nil
	}
	for _, k := range kinds {
		if k.group == group && k.resource == resource {
			return k
		}
	}
	return nil
}

// apiVersion is how objects name group and version; Kubernetes' own kinds have no group.
func (k *kind) apiVersion(version string) string {
	if k.group == "" {
		return version
	}
	return k.group + "/" + version
}

func (k *kind) scalesIn(version string) bool { return slices.Contains(k.scales, version) }

// document is under which name the objects of a kind are kept.
func (k *kind) document() string { return "agentsandbox." + k.resource }

package agentsandbox

import (
	"net/http"
	"runtime"
	"slices"
	"strings"
)

// kubernetesVersion is which API server clients are told that they speak to: they turn features on by it.
const kubernetesVersion = "v1.34.0"

// verbs are what can be done with kinds that are kept.
var verbs = []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}

// apiGroup is a group of kinds.
type apiGroup struct {
	name     string
	versions []string
}

var groups = []apiGroup{
	{coreGroup, versions}, {extensionsGroup, versions}, {authorizationGroup, []string{"v1"}}, {authenticationGroup, []string{"v1"}},
}

// resource is a kind as discovery tells it.
type resource struct {
	Name       string   `json:"name"`
	Singular   string   `json:"singularName"`
	Namespaced bool     `json:"namespaced"`
	Group      string   `json:"group,omitempty"`
	Version    string   `json:"version,omitempty"`
	Kind       string   `json:"kind"`
	Verbs      []string `json:"verbs"`
	ShortNames []string `json:"shortNames,omitempty"`
	Categories []string `json:"categories,omitempty"`
}

// discover answers what there is at this server; served is false for every other path.
func (a *API) discover(c *call) (served bool, err error) {
	answer := a.discovered(c.r.URL.Path)
	if answer == nil {
		return a.serveOpenAPI(c)
	}
	if c.r.Method != http.MethodGet {
		return true, wrongMethod()
	}
	if _, err := accepted(c.r); err != nil {
		return true, err
	}
	respond(c.w, http.StatusOK, answer)
	return true, nil
}

func (a *API) discovered(path string) any {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case path == "/version":
		return fields{
			"major": "1", "minor": "34", "gitVersion": kubernetesVersion + "+cove-" + a.cfg.Version, "gitCommit": "", "gitTreeState": "clean",
			"buildDate": "1970-01-01T00:00:00Z", "goVersion": runtime.Version(), "compiler": runtime.Compiler, "platform": runtime.GOOS + "/" + runtime.GOARCH,
		}
	case path == "/livez":
		return fields{"status": "ok"}
	case len(parts) == 1 && parts[0] == "api":
		return fields{"kind": "APIVersions", "versions": []string{"v1"}, "serverAddressByClientCIDRs": []any{}}
	case len(parts) == 2 && parts[0] == "api" && parts[1] == "v1":
		return resources("v1", coreResources)
	case len(parts) == 1 && parts[0] == "apis":
		all := []any{}
		for _, g := range groups {
			all = append(all, g.describe())
		}
		return fields{"kind": "APIGroupList", "apiVersion": "v1", "groups": all}
	case len(parts) == 2 && parts[0] == "apis":
		for _, g := range groups {
			if g.name == parts[1] {
				f := g.describe()
				f["kind"], f["apiVersion"] = "APIGroup", "v1"
				return f
			}
		}
	case len(parts) == 3 && parts[0] == "apis":
		return groupResources(parts[1], parts[2])
	}
	return nil
}

func (g apiGroup) describe() fields {
	all := []any{}
	for _, v := range g.versions {
		all = append(all, fields{"groupVersion": g.name + "/" + v, "version": v})
	}
	return fields{"name": g.name, "versions": all, "preferredVersion": all[0]}
}

func resources(groupVersion string, all []resource) fields {
	return fields{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": groupVersion, "resources": all}
}

func groupResources(group, version string) any {
	i := slices.IndexFunc(groups, func(g apiGroup) bool { return g.name == group && slices.Contains(g.versions, version) })
	if i < 0 {
		return nil
	}
	switch group {
	case authorizationGroup:
		return resources(group+"/"+version, []resource{{Name: "selfsubjectaccessreviews", Singular: "selfsubjectaccessreview", Kind: "SelfSubjectAccessReview", Verbs: []string{"create"}}})
	case authenticationGroup:
		return resources(group+"/"+version, []resource{{Name: "selfsubjectreviews", Singular: "selfsubjectreview", Kind: "SelfSubjectReview", Verbs: []string{"create"}}})
	}
	all := []resource{}
	for _, k := range kinds {
		if k.group == group {
			all = append(all, k.resources(version)...)
		}
	}
	return resources(group+"/"+version, all)
}

func (k *kind) resources(version string) []resource {
	r := resource{Name: k.resource, Singular: k.singular, Namespaced: true, Kind: k.name, Verbs: verbs}
	if k.short != "" {
		r.ShortNames = []string{k.short}
	}
	all := []resource{r}
	if k.hasStatus {
		all = append(all, resource{Name: k.resource + "/status", Namespaced: true, Kind: k.name, Verbs: []string{"get"}})
	}
	if k.scalesIn(version) {
		all = append(all, resource{Name: k.resource + "/scale", Namespaced: true, Group: "autoscaling", Version: "v1", Kind: "Scale", Verbs: []string{"get", "patch", "update"}})
	}
	return all
}

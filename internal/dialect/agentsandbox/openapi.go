package agentsandbox

import (
	"net/http"
	"slices"
	"strings"
)

// kubectl reads a description of the API before it creates or applies anything. Ours says that the server checks fields
// itself, and what there is; it does not describe every field of a Pod.

const (
	openAPIv2 = "/openapi/v2"
	openAPIv3 = "/openapi/v3"
	// protoOpenAPI is how older kubectl wants the older description. Without a byte it is one that describes nothing, so that
	// such a kubectl checks nothing either.
	protoOpenAPI = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
)

func (a *API) serveOpenAPI(c *call) (served bool, err error) {
	path := c.r.URL.Path
	if path != openAPIv2 && path != openAPIv3 && !strings.HasPrefix(path, openAPIv3+"/") {
		return false, nil
	}
	if c.r.Method != http.MethodGet {
		return true, wrongMethod()
	}
	switch rest := strings.TrimPrefix(path, openAPIv3); {
	case path == openAPIv2 && strings.Contains(strings.Join(c.r.Header.Values("Accept"), ","), "proto-openapi"):
		c.w.Header().Set("Content-Type", protoOpenAPI)
		c.w.WriteHeader(http.StatusOK)
	case path == openAPIv2:
		respond(c.w, http.StatusOK, fields{"swagger": "2.0", "info": about3(), "paths": fields{}, "definitions": fields{}})
	case rest == "":
		respond(c.w, http.StatusOK, fields{"paths": openAPIPaths()})
	default:
		parts := strings.Split(strings.Trim(rest, "/"), "/")
		if len(parts) != 3 || parts[0] != "apis" || !slices.Contains(versions, parts[2]) || parts[1] != coreGroup && parts[1] != extensionsGroup {
			return true, noSuchPath()
		}
		respond(c.w, http.StatusOK, describeGroup(parts[1], parts[2]))
	}
	return true, nil
}

func about3() fields { return fields{"title": "Cove", "version": kubernetesVersion} }

func openAPIPaths() fields {
	all := fields{}
	for _, group := range []string{coreGroup, extensionsGroup} {
		for _, version := range versions {
			name := "apis/" + group + "/" + version
			all[name] = fields{"serverRelativeURL": openAPIv3 + "/" + name}
		}
	}
	return all
}

func describeGroup(group, version string) fields {
	paths, schemas := fields{}, fields{}
	for _, k := range kinds {
		if k.group != group {
			continue
		}
		kindName := fields{"group": group, "version": version, "kind": k.name}
		do := func(verb string) fields {
			return fields{
				"x-kubernetes-action": verb, "x-kubernetes-group-version-kind": kindName, "responses": fields{},
				"parameters": []any{fields{"name": "fieldValidation", "in": "query", "schema": fields{"type": "string"}}, fields{"name": "dryRun", "in": "query", "schema": fields{"type": "string"}}},
			}
		}
		base := "/apis/" + group + "/" + version + "/namespaces/{namespace}/" + k.resource
		paths[base] = fields{"post": do("post")}
		paths[base+"/{name}"] = fields{"put": do("put"), "patch": do("patch")}
		schemas[k.name+"."+version] = fields{
			"type": "object", "x-kubernetes-group-version-kind": []any{kindName}, "description": purposes[k],
			"properties": fields{
				"apiVersion": fields{"type": "string"}, "kind": fields{"type": "string"}, "metadata": freeSchema(), "spec": freeSchema(), "status": freeSchema(),
			},
		}
	}
	return fields{"openapi": "3.0.0", "info": about3(), "paths": paths, "components": fields{"schemas": schemas}}
}

func freeSchema() fields {
	return fields{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
}

var purposes = map[*kind]string{
	sandboxKind:  "Sandbox is one isolated computer.",
	claimKind:    "SandboxClaim asks for a sandbox from a warm pool; the sandbox ends with it.",
	templateKind: "SandboxTemplate is what sandboxes start from.",
	poolKind:     "SandboxWarmPool keeps sandboxes of a template ready.",
}

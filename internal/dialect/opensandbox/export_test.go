package opensandbox

import "github.com/covehq/cove/internal/template"

// Proxied reads the path of a port.
func Proxied(path string) (id string, port int, rest string, ok bool) {
	v, ok := parseProxy(path)
	return v.id, v.port, v.path, ok
}

// Plan reads a create.
func Plan(req CreateRequest, most template.Limits) error {
	_, err := req.plan(most)
	return err
}

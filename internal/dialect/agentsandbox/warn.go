package agentsandbox

import (
	"net/http"
	"strconv"
)

// warn tells what of an object is not done here; kubectl prints it.
func (a *API) warn(w http.ResponseWriter, tenant string, o *object) {
	if _, exact := networkOf(o, a.opens(tenant)); !exact {
		addWarning(w, "spec.networkPolicy: rules about ports, Pods and private addresses that the operator has not opened open nothing here")
	}
	pod := inner(o.spec(), "podTemplate", "spec")
	if pod == nil {
		return
	}
	containers := list(pod, "containers")
	if len(containers) > 1 {
		addWarning(w, "only the first container is run; a sandbox is one computer")
	}
	var first fields
	if len(containers) > 0 {
		first, _ = containers[0].(fields)
	}
	for _, name := range []string{"command", "args"} {
		if first[name] != nil {
			addWarning(w, "spec.podTemplate.spec.containers[0]."+name+" is not run: a sandbox waits for commands")
			break
		}
	}
	for _, name := range []string{"initContainers", "volumes"} {
		if len(list(pod, name)) > 0 {
			addWarning(w, "spec.podTemplate.spec."+name+" is not served here")
		}
	}
}

func addWarning(w http.ResponseWriter, message string) {
	w.Header().Add("Warning", "299 - "+strconv.Quote(message))
}

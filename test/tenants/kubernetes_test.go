package tenants_test

// kubernetesKinds are the kinds of objects that the Kubernetes dialect keeps.
var kubernetesKinds = []struct{ group, resource string }{
	{"agents.x-k8s.io", "sandboxes"},
	{"extensions.agents.x-k8s.io", "sandboxclaims"},
	{"extensions.agents.x-k8s.io", "sandboxtemplates"},
	{"extensions.agents.x-k8s.io", "sandboxwarmpools"},
}

package cove

import (
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// Kubernetes is what the API asks of whoever speaks Kubernetes' API.
type Kubernetes interface {
	Kubernetes(p auth.Principal) client.KubernetesAccess
}

// SetKubernetes lets the API tell how that is reached. It is set before the API serves.
func (a *API) SetKubernetes(k Kubernetes) { a.kubernetes = k }

func (a *API) kubernetesAccess(c *call) error {
	if a.kubernetes == nil {
		return fault.New(fault.Unsupported, "this server does not speak Kubernetes' API: agent_sandbox.listen is off")
	}
	return c.answer(http.StatusOK, a.kubernetes.Kubernetes(c.who))
}

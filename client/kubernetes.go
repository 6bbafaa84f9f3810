package client

import (
	"context"
	"net/http"
)

// Kubernetes tells how kubectl and the clients of agent-sandbox reach the server.
func (c *Client) Kubernetes(ctx context.Context) (*KubernetesAccess, error) {
	var a KubernetesAccess
	if err := c.do(ctx, http.MethodGet, "/kubernetes", nil, nil, &a); err != nil {
		return nil, err
	}
	return &a, nil
}

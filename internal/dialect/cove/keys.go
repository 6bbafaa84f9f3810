package cove

import (
	"cmp"
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
)

func (a *API) createKey(c *call) error {
	var req client.KeyRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	secret, record, err := a.keys.Create(c.ctx(), cmp.Or(req.Tenant, c.who.Tenant), req.Name, req.Admin)
	if err != nil {
		return err
	}

	c.w.Header().Set("Cache-Control", "no-store")
	return c.answer(http.StatusCreated, client.NewKey{Key: wireKey(&record), Secret: string(secret)})
}

func (a *API) listKeys(c *call) error {
	q := c.query()
	if q.err != nil {
		return q.err
	}

	records, err := a.keys.List(c.ctx(), cmp.Or(q.text("tenant"), c.who.Tenant))
	if err != nil {
		return err
	}

	out := client.KeyList{Keys: make([]client.Key, len(records))}
	for i := range records {
		out.Keys[i] = wireKey(&records[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) revokeKey(c *call) error {
	q := c.query()
	if q.err != nil {
		return q.err
	}
	if err := a.keys.Revoke(c.ctx(), cmp.Or(q.text("tenant"), c.who.Tenant), c.r.PathValue("key")); err != nil {
		return err
	}
	return c.nothing()
}

func wireKey(r *auth.KeyRecord) client.Key {
	return client.Key{
		ID: r.ID, Tenant: r.Tenant, Name: r.Name, Prefix: r.Prefix, Admin: r.Admin, CreatedAt: r.CreatedAt, RevokedAt: r.RevokedAt, LastUsed: r.LastUsed,
	}
}

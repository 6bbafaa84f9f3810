package cove

import (
	"net/http"
	"slices"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func (a *API) snapshot(c *call) error {
	var req client.SnapshotRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}

	t, err := a.sandboxes.SnapshotAs(c.ctx(), c.who, c.id(), sandbox.SnapshotSpec{
		Name: req.Name, Description: req.Description, Env: req.Env, User: req.User, Workdir: req.Workdir,
	})
	if err != nil {
		return err
	}

	c.w.Header().Set("Location", Prefix+"/templates/"+t.Name)
	info := template.Info{Name: t.Name, Description: t.Description, Source: template.SourceSnapshot}
	return c.answer(http.StatusCreated, wireTemplate(&info, t))
}

func (a *API) listTemplates(c *call) error {
	list := a.templates.List(c.who.Tenant)
	out := client.TemplateList{Templates: make([]client.TemplateInfo, len(list))}
	for i := range list {
		t, err := a.templates.Resolve(c.ctx(), c.who.Tenant, list[i].Name)
		if err != nil {
			t = nil // defined and not built: all there is to tell is told
		}
		out.Templates[i] = wireTemplate(&list[i], t)
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) getTemplate(c *call) error {
	name := c.r.PathValue("name")
	t, err := a.templates.Resolve(c.ctx(), c.who.Tenant, name)
	if err != nil && !fault.Is(err, fault.Unavailable) {
		return err
	}
	list := a.templates.List(c.who.Tenant)
	at := slices.IndexFunc(list, func(i template.Info) bool { return i.Name == name })
	if at < 0 {
		return fault.New(fault.NotFound, "there is no template %.64q", name)
	}
	return c.answer(http.StatusOK, wireTemplate(&list[at], t))
}

func (a *API) removeTemplate(c *call) error {
	if err := a.sandboxes.RemoveTemplate(c.ctx(), c.who, c.r.PathValue("name")); err != nil {
		return err
	}
	return c.nothing()
}

// wireTemplate is a line of the list with what is known once it is built; t is nil before that.
func wireTemplate(info *template.Info, t *template.Template) client.TemplateInfo {
	out := client.TemplateInfo{
		Name: info.Name, Description: info.Description, From: info.From, Source: info.Kind(), TenantOwned: info.Tenant != "", CreatedAt: info.Created,
	}
	if t == nil {
		return out
	}
	out.Built, out.Digest, out.TenantOwned = true, t.Digest, t.Tenant != ""
	out.User, out.Workdir, out.Env, out.Sudo = t.User, t.Workdir, t.Env, t.Sudo
	out.Limits, out.Warnings = client.Limits(t.Limits), t.Warnings
	if t.Python.Executable != "" {
		out.Python = &client.TemplatePython{Executable: t.Python.Executable, Version: t.Python.Version, Preload: t.Python.Preload}
	}
	if t.Snapshot != nil {
		out.From, out.CreatedAt = t.Snapshot.From, t.Snapshot.Created
	}
	return out
}

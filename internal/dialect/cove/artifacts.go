package cove

import (
	"context"
	"net/http"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
)

// Artifacts is what the API asks of whoever keeps files.
type Artifacts interface {
	Get(ctx context.Context, tenant, id string) (artifact.Artifact, error)
	Datasets(ctx context.Context, tenant, id string) ([]artifact.Dataset, error)
	List(ctx context.Context, tenant string, q artifact.Query) (artifact.Page, error)
	Remove(ctx context.Context, tenant, id string) error
	Open(ctx context.Context, tenant, id string) (artifact.Artifact, artifact.Content, error)
	Link(a artifact.Artifact, ttl time.Duration) (url string, expires time.Time, err error)
	RotateKey(ctx context.Context, revoke bool) error
}

// SetArtifacts lets the API answer for artifacts. It is set before the API serves.
func (a *API) SetArtifacts(k Artifacts) { a.artifacts = k }

// Runs is what lineage asks of whoever runs cells.
type Runs interface {
	// RunOf finds a run, or fault.NotFound when its session is gone.
	RunOf(ctx context.Context, tenant, run string) (session.Run, error)
}

// SetRuns lets the API tell which code made an artifact. It is set before the API serves.
func (a *API) SetRuns(r Runs) { a.runs = r }

var errNoArtifacts = fault.New(fault.Unsupported, "this server has no artifacts: where there are several servers they need a volume that all of them have (server.shared_volume)")

func (a *API) listArtifacts(c *call) error {
	q := c.query()
	query := artifact.Query{Key: q.text("session"), Run: q.text("run"), SHA256: q.text("sha256"), Cursor: q.cursor(numberCursor),
		Limit: int(q.integer("limit", 1, artifact.MaxLimit))}
	if q.err != nil {
		return q.err
	}
	if a.artifacts == nil {
		return errNoArtifacts
	}

	page, err := a.artifacts.List(c.ctx(), c.who.Tenant, query)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, client.ArtifactList{Artifacts: a.wireArtifacts(page.Artifacts), Cursor: page.Cursor})
}

func (a *API) getArtifact(c *call) error {
	if a.artifacts == nil {
		return errNoArtifacts
	}

	art, err := a.artifacts.Get(c.ctx(), c.who.Tenant, c.r.PathValue("artifact"))
	if err != nil {
		return err
	}
	out, err := a.wholeArtifact(c, &art)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, out)
}

func (a *API) readArtifact(c *call) error {
	if a.artifacts == nil {
		return errNoArtifacts
	}

	art, content, err := a.artifacts.Open(c.ctx(), c.who.Tenant, c.r.PathValue("artifact"))
	if err != nil {
		return err
	}
	defer content.Close()

	serveArtifact(c.w, c.r, &art, content)
	return nil
}

func (a *API) artifactLineage(c *call) error {
	if a.artifacts == nil {
		return errNoArtifacts
	}

	art, err := a.artifacts.Get(c.ctx(), c.who.Tenant, c.r.PathValue("artifact"))
	if err != nil {
		return err
	}
	same, err := a.artifacts.List(c.ctx(), c.who.Tenant, artifact.Query{SHA256: art.SHA256})
	if err != nil {
		return err
	}
	whole, err := a.wholeArtifact(c, &art)
	if err != nil {
		return err
	}
	out := client.ArtifactLineage{Artifact: whole, SameTruncated: same.Cursor != ""}
	if err := a.madeBy(c, &art, &out); err != nil {
		return err
	}

	for i := range same.Artifacts {
		if same.Artifacts[i].ID != art.ID {
			out.Same = append(out.Same, a.wireArtifact(&same.Artifacts[i]))
		}
	}
	return c.answer(http.StatusOK, out)
}

// madeBy adds the cell that made an artifact, where it is still known.
func (a *API) madeBy(c *call, art *artifact.Artifact, out *client.ArtifactLineage) error {
	if a.runs == nil || art.Run == "" {
		return nil
	}
	run, err := a.runs.RunOf(c.ctx(), c.who.Tenant, art.Run)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	out.Code, out.Outcome, out.StartedAt = run.Code, run.Outcome, run.Started
	return err
}

func (a *API) linkArtifact(c *call) error {
	var req client.LinkRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	ttl, err := duration("ttl_seconds", req.TTLSeconds)
	if err != nil {
		return err
	}
	if a.artifacts == nil {
		return errNoArtifacts
	}

	art, err := a.artifacts.Get(c.ctx(), c.who.Tenant, c.r.PathValue("artifact"))
	if err != nil {
		return err
	}
	link, expires, err := a.artifacts.Link(art, ttl)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, client.Link{URL: link, ExpiresAt: expires})
}

func (a *API) removeArtifact(c *call) error {
	if a.artifacts == nil {
		return errNoArtifacts
	}

	if err := a.artifacts.Remove(c.ctx(), c.who.Tenant, c.r.PathValue("artifact")); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) rotateLinkKey(c *call) error {
	q := c.query()
	revoke := q.flag("revoke")
	if q.err != nil {
		return q.err
	}
	if a.artifacts == nil {
		return errNoArtifacts
	}

	if err := a.artifacts.RotateKey(c.ctx(), revoke); err != nil {
		return err
	}

	return c.nothing()
}

func (a *API) wireArtifacts(list []artifact.Artifact) []client.Artifact {
	out := make([]client.Artifact, len(list))
	for i := range list {
		out[i] = a.wireArtifact(&list[i])
	}
	return out
}

// wholeArtifact says also from what an artifact could be made, which would be too much for many.
func (a *API) wholeArtifact(c *call, art *artifact.Artifact) (client.Artifact, error) {
	out := a.wireArtifact(art)
	from, err := a.artifacts.Datasets(c.ctx(), c.who.Tenant, art.ID)
	for _, d := range from {
		out.Datasets = append(out.Datasets, client.ArtifactDataset{ID: d.ID, SHA256: d.SHA256})
	}
	return out, err
}

// wireArtifact has a link for whoever may see the artifact anyway.
func (a *API) wireArtifact(art *artifact.Artifact) client.Artifact {
	out := client.Artifact{ID: art.ID, Name: art.Name, Path: art.Path, MIME: art.MIME, Size: art.Size, SHA256: art.SHA256,
		CreatedAt: art.Created, ExpiresAt: art.Expires, Session: art.Key, Sandbox: art.Sandbox, Run: art.Run, Cell: art.Cell,
		ToolCall: art.ToolCall, Error: art.Error}
	if a.artifacts != nil && art.ID != "" {
		if link, expires, err := a.artifacts.Link(*art, 0); err == nil {
			out.URL, out.URLExpires = link, expires
		}
	}
	return out
}

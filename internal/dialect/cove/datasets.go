package cove

import (
	"context"
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
)

// Datasets is what the API asks of whoever stages data into sessions.
type Datasets interface {
	List(ctx context.Context, p auth.Principal, key string) ([]dataset.Dataset, error)
	Stage(ctx context.Context, p auth.Principal, key string, up dataset.Upload) (dataset.Dataset, error)
	Mark(ctx context.Context, p auth.Principal, key string, m dataset.Mark) (dataset.Dataset, error)
	Remove(ctx context.Context, p auth.Principal, key, id string) error
}

// SetDatasets lets the API answer for data of sessions. It is set before the API serves.
func (a *API) SetDatasets(d Datasets) { a.datasets = d }

var errNoDatasets = fault.New(fault.Unsupported, "this server has no datasets: where there are several servers they need a volume that all of them have (server.shared_volume)")

func (a *API) listDatasets(c *call) error {
	if a.datasets == nil {
		return errNoDatasets
	}

	all, err := a.datasets.List(c.ctx(), c.who, c.key())
	if err != nil {
		return err
	}

	out := client.DatasetList{Datasets: make([]client.Dataset, len(all))}
	for i := range all {
		out.Datasets[i] = wireDataset(&all[i])
	}
	return c.answer(http.StatusOK, out)
}

func (a *API) stageDataset(c *call) error {
	q := c.query()
	up := dataset.Upload{ID: c.r.PathValue("dataset"), File: q.text("file"), Size: c.r.ContentLength, Body: &upload{c.w, c.r.Body}}
	if q.err != nil {
		return q.err
	}
	if a.datasets == nil {
		return errNoDatasets
	}

	d, err := a.datasets.Stage(c.ctx(), c.who, c.key(), up)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireDataset(&d))
}

func (a *API) markDataset(c *call) error {
	var req client.DatasetRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if a.datasets == nil {
		return errNoDatasets
	}

	d, err := a.datasets.Mark(c.ctx(), c.who, c.key(), dataset.Mark{
		ID: c.r.PathValue("dataset"), File: req.File, Status: dataset.Status(req.Status), SHA256: req.SHA256, Error: req.Error,
	})
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireDataset(&d))
}

func (a *API) removeDataset(c *call) error {
	if a.datasets == nil {
		return errNoDatasets
	}

	if err := a.datasets.Remove(c.ctx(), c.who, c.key(), c.r.PathValue("dataset")); err != nil {
		return err
	}

	return c.nothing()
}

func wireDataset(d *dataset.Dataset) client.Dataset {
	status := d.Status
	if status == dataset.Staging {
		status = dataset.Pending
	}
	return client.Dataset{ID: d.ID, Status: string(status), Path: d.Path, Size: d.Size, SHA256: d.SHA256, UpdatedAt: d.Updated, Error: d.Error}
}

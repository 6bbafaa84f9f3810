package session

import (
	"context"
	"log/slog"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
)

// Staging is what Data asks of whoever keeps datasets.
type Staging interface {
	List(ctx context.Context, tenant, session string) ([]dataset.Dataset, error)
	Stage(ctx context.Context, tenant, session string, up dataset.Upload, find dataset.Finder) (dataset.Dataset, error)
	Mark(ctx context.Context, tenant, session string, m dataset.Mark, find dataset.Finder) (dataset.Dataset, error)
	Remove(ctx context.Context, tenant, session, id string, find dataset.Finder) error
}

// Owners is what Data asks of sessions: a Manager.
type Owners interface {
	Resolve(ctx context.Context, p auth.Principal, key string) (Session, error)
	Agent(ctx context.Context, p auth.Principal, key string) (*agentapi.Client, error)
	Note(ctx context.Context, p auth.Principal, key string, line LogLine) error
}

// Data is the data of sessions as their owners stage it: only into sessions that take it, and with a line in their log.
type Data struct {
	owners  Owners
	staging Staging
	log     *slog.Logger
}

// NewData makes a Data.
func NewData(o Owners, s Staging, log *slog.Logger) *Data { return &Data{o, s, log} }

// List are the datasets of a session, by id: those that were staged, or the files of the host's directory.
func (d *Data) List(ctx context.Context, p auth.Principal, key string) ([]dataset.Dataset, error) {
	s, err := d.owners.Resolve(ctx, p, key)
	if err != nil {
		return nil, err
	}
	if dataset.Access(s.Datasets.Access) == dataset.AccessLocal {
		return dataset.ListLocal(ctx, d.agent(p, key))
	}
	return d.staging.List(ctx, s.Tenant, s.ID)
}

// Stage takes a dataset in; whether it came is in the session's log.
func (d *Data) Stage(ctx context.Context, p auth.Principal, key string, up dataset.Upload) (dataset.Dataset, error) {
	s, err := d.takes(ctx, p, key)
	if err != nil {
		return dataset.Dataset{}, err
	}
	got, err := d.staging.Stage(ctx, s.Tenant, s.ID, up, d.agent(p, key))
	if err != nil {
		d.note(ctx, p, key, dataset.Dataset{ID: up.ID, Status: dataset.Failed, Error: fault.Message(err)})
		return got, err
	}
	d.note(ctx, p, key, got)
	return got, nil
}

// Mark writes down what a caller says of a dataset.
func (d *Data) Mark(ctx context.Context, p auth.Principal, key string, m dataset.Mark) (dataset.Dataset, error) {
	s, err := d.takes(ctx, p, key)
	if err != nil {
		return dataset.Dataset{}, err
	}
	got, err := d.staging.Mark(ctx, s.Tenant, s.ID, m, d.agent(p, key))
	if err == nil && got.Status == m.Status {
		d.note(ctx, p, key, got)
	}
	return got, err
}

// Remove takes a dataset out of a session.
func (d *Data) Remove(ctx context.Context, p auth.Principal, key, id string) error {
	s, err := d.takes(ctx, p, key)
	if err != nil {
		return err
	}
	return d.staging.Remove(ctx, s.Tenant, s.ID, id, d.agent(p, key))
}

// takes is a session into which data is staged.
func (d *Data) takes(ctx context.Context, p auth.Principal, key string) (Session, error) {
	s, err := d.owners.Resolve(ctx, p, key)
	if err != nil {
		return s, err
	}
	if access := dataset.Access(s.Datasets.Access); access != dataset.AccessAPI {
		return s, dataset.ErrNotStaged(s.Key, access)
	}
	return s, nil
}

// agent finds the sandbox of a session.
func (d *Data) agent(p auth.Principal, key string) dataset.Finder {
	return func(ctx context.Context) (*agentapi.Client, error) { return d.owners.Agent(ctx, p, key) }
}

// note writes what became of a dataset into its session's log, unless its id is no id, which may be any text of any length. What
// happened has happened: a log that cannot be written changes nothing.
func (d *Data) note(ctx context.Context, p auth.Principal, key string, got dataset.Dataset) {
	line := LogLine{Dataset: got.ID, SHA256: got.SHA256}
	switch got.Status {
	case dataset.Loaded:
		line.Event = LogDatasetLoaded
	case dataset.Failed:
		line.Event, line.Error = LogDatasetFailed, got.Error
	case dataset.Pending, dataset.Staging:
		return
	}
	if !dataset.ValidID(got.ID) {
		return
	}
	ctx = context.WithoutCancel(ctx) // an upload fails because its sender has gone, and that is what is written
	if err := d.owners.Note(ctx, p, key, line); err != nil {
		d.log.Warn("a session's log is not written", "dataset", got.ID, "error", err)
	}
}

package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
)

var _ dataset.Index = (*Store)(nil)

const (
	datasetColumns  = `session, id, tenant, file, status, path, size, sha256, error, updated`
	datasetsQuery   = `SELECT ` + datasetColumns + ` FROM datasets WHERE session = ?1 AND (?2 = '' OR tenant = ?2) ORDER BY id`
	datasetQuery    = `SELECT ` + datasetColumns + ` FROM datasets WHERE session = ?1 AND id = ?2 AND tenant = ?3`
	putDatasetQuery = `INSERT INTO datasets (` + datasetColumns + `) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
		ON CONFLICT (session, id) DO UPDATE SET file = ?4, status = ?5, path = ?6, size = ?7, sha256 = ?8, error = ?9, updated = ?10 WHERE datasets.tenant = ?3`
	placeDatasetQuery = `UPDATE datasets SET path = ?1 WHERE session = ?2 AND id = ?3 AND sha256 = ?4 AND file = ?5`
	failDatasetsQuery = `UPDATE datasets SET status = 'failed', error = ?1, updated = ?2
		WHERE status = 'staging' AND (?3 = '' OR session = ?3 AND id = ?4)`
	deleteDatasetQuery  = `DELETE FROM datasets WHERE session = ?1 AND id = ?2 AND tenant = ?3`
	forgetDatasetsQuery = `DELETE FROM datasets WHERE session = ?1`
	datasetsHeldQuery   = `SELECT coalesce(sum(size), 0), count(*) FROM (SELECT DISTINCT sha256, size FROM datasets WHERE tenant = ?1 AND sha256 <> '') AS content`
)

// Datasets are those of a session, by id; with no tenant, whoever's it is.
func (s *Store) Datasets(ctx context.Context, tenant, session string) ([]dataset.Dataset, error) {
	var all []dataset.Dataset
	err := s.query(ctx, datasetsQuery, []any{session, tenant}, func(rows *sql.Rows) error {
		d, err := scanDataset(rows)
		all = append(all, d)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list datasets: %w", err)
	}
	return all, nil
}

// Dataset is one of a session's, or fault.NotFound.
func (s *Store) Dataset(ctx context.Context, tenant, session, id string) (dataset.Dataset, error) {
	d, err := scanDataset(s.queryRow(ctx, datasetQuery, session, id, tenant))
	if errors.Is(err, sql.ErrNoRows) {
		return d, fault.New(fault.NotFound, "this session has no dataset %.128q", id)
	}
	if err != nil {
		return d, fmt.Errorf("read dataset: %w", err)
	}
	return d, nil
}

// PutDataset makes or changes one; a file that another of the session has is fault.Conflict.
func (s *Store) PutDataset(ctx context.Context, d dataset.Dataset) error {
	_, err := s.change(ctx, putDatasetQuery, d.Session, d.ID, d.Tenant, d.File, string(d.Status), d.Path, d.Size, d.SHA256, d.Error, micros(d.Updated))
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "another dataset of this session has the file name %s", d.File)
	}
	if err != nil {
		return fmt.Errorf("put dataset: %w", err)
	}
	return nil
}

// PlaceDataset changes the path of one, if it still has the same content.
func (s *Store) PlaceDataset(ctx context.Context, d dataset.Dataset) error {
	if _, err := s.change(ctx, placeDatasetQuery, d.Path, d.Session, d.ID, d.SHA256, d.File); err != nil {
		return fmt.Errorf("place dataset: %w", err)
	}
	return nil
}

// FailDatasets marks what is being staged as failed: one, or all there are for an empty session.
func (s *Store) FailDatasets(ctx context.Context, session, id, why string, now time.Time) error {
	if _, err := s.change(ctx, failDatasetsQuery, why, micros(now), session, id); err != nil {
		return fmt.Errorf("fail datasets: %w", err)
	}
	return nil
}

// DeleteDataset deletes one; one that is not there is deleted already.
func (s *Store) DeleteDataset(ctx context.Context, tenant, session, id string) error {
	if _, err := s.change(ctx, deleteDatasetQuery, session, id, tenant); err != nil {
		return fmt.Errorf("delete dataset: %w", err)
	}
	return nil
}

// ForgetDatasets deletes all of a session's.
func (s *Store) ForgetDatasets(ctx context.Context, session string) error {
	if _, err := s.change(ctx, forgetDatasetsQuery, session); err != nil {
		return fmt.Errorf("forget datasets: %w", err)
	}
	return nil
}

// DatasetsHeld is the size and the number of a tenant's contents, each once.
func (s *Store) DatasetsHeld(ctx context.Context, tenant string) (bytes int64, files int, err error) {
	if err := s.queryRow(ctx, datasetsHeldQuery, tenant).Scan(&bytes, &files); err != nil {
		return 0, 0, fmt.Errorf("size of datasets: %w", err)
	}
	return bytes, files, nil
}

func scanDataset(from scanner) (d dataset.Dataset, err error) {
	var updated int64
	err = from.Scan(&d.Session, &d.ID, &d.Tenant, &d.File, &d.Status, &d.Path, &d.Size, &d.SHA256, &d.Error, &updated)
	d.Updated = fromMicros(updated)
	return d, err
}

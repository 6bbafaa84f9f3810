package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// MaxDocument bounds one document: they are small state, read whole.
const MaxDocument = 1 << 20

const (
	putDocumentQuery = `INSERT INTO documents (tenant, kind, id, body, created, updated) VALUES (?1, ?2, ?3, ?4, ?5, ?5)
		ON CONFLICT (tenant, kind, id) DO UPDATE SET body = ?4, updated = ?5`
	documentQuery       = `SELECT id, body, created, updated FROM documents WHERE tenant = ?1 AND kind = ?2 AND id = ?3`
	documentsQuery      = `SELECT id, body, created, updated FROM documents WHERE tenant = ?1 AND kind = ?2 ORDER BY created, id`
	documentIDsQuery    = `SELECT id FROM documents WHERE tenant = ?1 AND kind = ?2 ORDER BY created, id`
	ownersQuery         = `SELECT DISTINCT tenant FROM documents WHERE kind = ?1 ORDER BY tenant`
	deleteDocumentQuery = `DELETE FROM documents WHERE tenant = ?1 AND kind = ?2 AND id = ?3`
)

// PutDocument keeps a document in the place of an earlier one of the same id.
func (s *Store) PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error {
	if tenant == "" || kind == "" || id == "" {
		return fault.New(fault.Invalid, "a document needs a tenant, a kind and an id")
	}
	if len(body) > MaxDocument {
		return fault.New(fault.Invalid, "a document has at most %d bytes, not %d", MaxDocument, len(body))
	}
	if body == nil {
		body = []byte{}
	}
	if _, err := s.change(ctx, putDocumentQuery, tenant, kind, id, body, micros(time.Now())); err != nil {
		return fmt.Errorf("put document: %w", err)
	}
	return nil
}

// Document finds a document's body, or fault.NotFound.
func (s *Store) Document(ctx context.Context, tenant, kind, id string) ([]byte, error) {
	d, err := scanDocument(s.queryRow(ctx, documentQuery, tenant, kind, id))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fault.New(fault.NotFound, "there is no %s %.128q", kind, id)
	}
	if err != nil {
		return nil, fmt.Errorf("read document: %w", err)
	}
	return d.Body, nil
}

// Documents are all documents of a kind, oldest first.
func (s *Store) Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error) {
	var docs []sandbox.Document
	err := s.query(ctx, documentsQuery, []any{tenant, kind}, func(rows *sql.Rows) error {
		d, err := scanDocument(rows)
		docs = append(docs, d)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list documents: %w", err)
	}
	return docs, nil
}

// DocumentIDs are the ids of all documents of a kind, oldest first: for whoever counts them, or reads one after the other.
func (s *Store) DocumentIDs(ctx context.Context, tenant, kind string) ([]string, error) {
	ids, err := s.texts(ctx, documentIDsQuery, tenant, kind)
	if err != nil {
		return nil, fmt.Errorf("list ids of documents: %w", err)
	}
	return ids, nil
}

// DocumentOwners are the tenants that have documents of a kind.
func (s *Store) DocumentOwners(ctx context.Context, kind string) ([]string, error) {
	tenants, err := s.texts(ctx, ownersQuery, kind)
	if err != nil {
		return nil, fmt.Errorf("list owners of documents: %w", err)
	}
	return tenants, nil
}

// texts are the rows of a query for one text.
func (s *Store) texts(ctx context.Context, query string, args ...any) (all []string, err error) {
	err = s.query(ctx, query, args, func(rows *sql.Rows) error {
		var text string
		err := rows.Scan(&text)
		all = append(all, text)
		return err
	})
	return all, err
}

// DeleteDocument removes a document; one that is not there is fault.NotFound.
func (s *Store) DeleteDocument(ctx context.Context, tenant, kind, id string) error {
	n, err := s.change(ctx, deleteDocumentQuery, tenant, kind, id)
	if err != nil {
		return fmt.Errorf("delete document: %w", err)
	}
	if n == 0 {
		return fault.New(fault.NotFound, "there is no %s %.128q", kind, id)
	}
	return nil
}

func scanDocument(from scanner) (d sandbox.Document, err error) {
	var created, updated int64
	err = from.Scan(&d.ID, &d.Body, &created, &updated)
	d.Created, d.Updated = fromMicros(created), fromMicros(updated)
	return d, err
}

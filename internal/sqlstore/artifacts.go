package sqlstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

var _ artifact.Index = (*Store)(nil)

const artifactColumns = `id, tenant, name, path, mime, size, sha256, created, expires, session, key, sandbox, run, cell, tool_call, source`

const (
	oneArtifact       = `(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	addArtifactQuery  = `INSERT INTO artifacts (` + artifactColumns + `, datasets) VALUES ` + oneArtifact
	artifactByIDQuery = `SELECT seq, ` + artifactColumns + ` FROM artifacts WHERE id = ?1`
	blobNamedQuery    = `SELECT EXISTS (SELECT 1 FROM artifacts WHERE tenant = ?1 AND sha256 = ?2)`
	heldQuery         = `SELECT session, bytes, files FROM artifact_sums WHERE tenant = ?1 AND session IN ('', ?2)`
	expiredQuery      = `DELETE FROM artifacts WHERE seq IN (SELECT seq FROM artifacts WHERE expires > 0 AND expires <= ?1 ORDER BY expires LIMIT ?2) RETURNING tenant, sha256, session, size, datasets`
	removeQuery       = `DELETE FROM artifacts WHERE tenant = ?1 AND id = ?2 RETURNING tenant, sha256, session, size, datasets`
	addDatasetsQuery  = `INSERT INTO artifact_datasets (tenant, digest, list) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING`
	datasetsOfQuery   = `SELECT d.list FROM artifacts a JOIN artifact_datasets d ON d.tenant = a.tenant AND d.digest = a.datasets WHERE a.tenant = ?1 AND a.id = ?2`
	dropDatasetsQuery = `DELETE FROM artifact_datasets WHERE tenant = ?1 AND digest = ?2 AND NOT EXISTS (SELECT 1 FROM artifacts WHERE tenant = ?1 AND datasets = ?2)`
	sumQuery          = `INSERT INTO artifact_sums (tenant, session, bytes, files) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (tenant, session)
		DO UPDATE SET bytes = artifact_sums.bytes + ?3, files = artifact_sums.files + ?4`
)

// addAtOnce is how many artifacts one statement adds: parsing costs more than running.
const addAtOnce = 50

// AddArtifacts adds all or none. All of them are one tenant's and could be made from the same datasets.
func (s *Store) AddArtifacts(ctx context.Context, list []artifact.Artifact, from []artifact.Dataset) error {
	if len(list) == 0 {
		return nil
	}
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		change := sums{}
		datasets, err := s.addDatasets(ctx, tx, list[0].Tenant, from)
		if err != nil {
			return err
		}
		if err := addArtifacts(ctx, tx, list, datasets); err != nil {
			return err
		}
		for i := range list {
			change.note(list[i].Tenant, list[i].Session, list[i].Size, 1)
		}
		return change.write(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("add artifacts: %w", err)
	}
	return nil
}

// addDatasets adds a list, unless the tenant has it, and returns what names it. Nobody drops it before the artifact is there.
func (s *Store) addDatasets(ctx context.Context, tx *sql.Tx, tenant string, from []artifact.Dataset) (digest string, err error) {
	if len(from) == 0 {
		return "", nil
	}
	text, err := json.Marshal(from)
	if err != nil {
		return "", err
	}
	if err := s.turn(ctx, tx, listsOf+tenant); err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	digest = hex.EncodeToString(sum[:])
	_, err = tx.ExecContext(ctx, addDatasetsQuery, tenant, digest, string(text))
	return digest, err
}

// ArtifactDatasets are what an artifact could be made from.
func (s *Store) ArtifactDatasets(ctx context.Context, tenant, id string) (from []artifact.Dataset, err error) {
	var text string
	err = s.queryRow(ctx, datasetsOfQuery, tenant, id).Scan(&text)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &from)
	}
	if err != nil {
		return nil, fmt.Errorf("read the datasets of an artifact: %w", err)
	}
	return from, nil
}

// addArtifacts adds many by one statement that is parsed once, and what is left of them by another.
func addArtifacts(ctx context.Context, tx *sql.Tx, list []artifact.Artifact, datasets string) error {
	query := func(n int) string { return addArtifactQuery + strings.Repeat(", "+oneArtifact, n-1) }
	if len(list) >= addAtOnce {
		many, err := tx.PrepareContext(ctx, query(addAtOnce))
		if err != nil {
			return err
		}
		defer many.Close()
		for ; len(list) >= addAtOnce; list = list[addAtOnce:] {
			if _, err := many.ExecContext(ctx, artifactValues(list[:addAtOnce], datasets)...); err != nil {
				return err
			}
		}
	}
	if len(list) == 0 {
		return nil
	}
	_, err := tx.ExecContext(ctx, query(len(list)), artifactValues(list, datasets)...)
	return err
}

// artifactValues are the columns of artifacts, one row after the other.
func artifactValues(list []artifact.Artifact, datasets string) (values []any) {
	for i := range list {
		a := &list[i]
		values = append(values, a.ID, a.Tenant, a.Name, a.Path, a.MIME, a.Size, a.SHA256, micros(a.Created), micros(a.Expires),
			a.Session, a.Key, a.Sandbox, a.Run, a.Cell, a.ToolCall, a.Source, datasets)
	}
	return values
}

// sums are what is kept by tenant and session; session "" is all of a tenant.
type sums map[[2]string]struct {
	bytes int64
	files int
}

func (s sums) note(tenant, session string, bytes int64, files int) {
	for _, name := range [][2]string{{tenant, ""}, {tenant, session}} {
		sum := s[name]
		sum.bytes += bytes
		sum.files += files
		s[name] = sum
		if session == "" {
			return
		}
	}
}

// write changes them in the same order as everybody else, who would otherwise be in the way.
func (s sums) write(ctx context.Context, tx *sql.Tx) error {
	names := slices.SortedFunc(maps.Keys(s), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	for _, name := range names {
		sum := s[name]
		if _, err := tx.ExecContext(ctx, sumQuery, name[0], name[1], sum.bytes, sum.files); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM artifact_sums WHERE tenant = ?1 AND session = ?2 AND files <= 0`, name[0], name[1]); err != nil {
			return err
		}
	}
	return nil
}

// ArtifactByID finds one of any tenant, or fault.NotFound.
func (s *Store) ArtifactByID(ctx context.Context, id string) (artifact.Artifact, error) {
	a, _, err := scanArtifact(s.queryRow(ctx, artifactByIDQuery, id))
	if errors.Is(err, sql.ErrNoRows) {
		return a, noArtifact(id)
	}
	if err != nil {
		return a, fmt.Errorf("find artifact: %w", err)
	}
	return a, nil
}

func noArtifact(id string) error { return fault.New(fault.NotFound, "there is no artifact %.64q", id) }

// Artifacts is a page of a tenant's, newest first.
func (s *Store) Artifacts(ctx context.Context, tenant string, q artifact.Query) (artifact.Page, error) {
	where, args, err := artifactFilter(tenant, q)
	if err != nil {
		return artifact.Page{}, err
	}
	var page artifact.Page
	var last int64
	more := false
	query := `SELECT seq, ` + artifactColumns + ` FROM artifacts WHERE ` + where + ` ORDER BY seq DESC LIMIT ?`
	err = s.query(ctx, query, append(args, q.Limit+1), func(rows *sql.Rows) error {
		a, seq, err := scanArtifact(rows)
		if err != nil {
			return err
		}
		if len(page.Artifacts) == q.Limit {
			more = true
			return nil
		}
		page.Artifacts, last = append(page.Artifacts, a), seq
		return nil
	})
	if err != nil {
		return artifact.Page{}, fmt.Errorf("list artifacts: %w", err)
	}
	if more {
		page.Cursor = strconv.FormatInt(last, 36)
	}
	return page, nil
}

func artifactFilter(tenant string, q artifact.Query) (where string, args []any, err error) {
	where, args = "tenant = ?", []any{tenant}
	for _, f := range []struct{ column, value string }{{"session", q.Session}, {"key", q.Key}, {"run", q.Run}, {"sha256", q.SHA256}} {
		if f.value != "" {
			where, args = where+" AND "+f.column+" = ?", append(args, f.value)
		}
	}
	if !q.At.IsZero() {
		where, args = where+" AND (expires = 0 OR expires > ?)", append(args, micros(q.At))
	}
	if q.Cursor != "" {
		seq, err := strconv.ParseInt(q.Cursor, 36, 64)
		if err != nil || seq < 1 {
			return "", nil, fault.New(fault.Invalid, "%.64q is not the cursor of a page", q.Cursor)
		}
		where, args = where+" AND seq < ?", append(args, seq)
	}
	return where, args, nil
}

// RemoveArtifact removes one, or fault.NotFound.
func (s *Store) RemoveArtifact(ctx context.Context, tenant, id string) error {
	refs, err := s.removeArtifacts(ctx, s.limit, removeQuery, tenant, id)
	if err != nil {
		return fmt.Errorf("remove artifact: %w", err)
	}
	if len(refs) == 0 {
		return noArtifact(id)
	}
	return nil
}

// RemoveExpired removes some of those whose time is over and tells which blobs they named.
func (s *Store) RemoveExpired(ctx context.Context, now time.Time, limit int) ([]artifact.Ref, error) {
	refs, err := s.removeArtifacts(ctx, batchTime, expiredQuery, micros(now), limit)
	if err != nil {
		return nil, fmt.Errorf("remove expired artifacts: %w", err)
	}
	return refs, nil
}

// removeArtifacts runs a deletion, takes what it removed from the sums and drops lists that nothing names any more.
func (s *Store) removeArtifacts(ctx context.Context, limit time.Duration, query string, args ...any) (refs []artifact.Ref, err error) {
	err = s.inTxWithin(ctx, limit, func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		change, lists := sums{}, map[string][]string{} // digests by tenant
		refs = nil
		for rows.Next() {
			var r artifact.Ref
			var session, datasets string
			var size int64
			if err := rows.Scan(&r.Tenant, &r.SHA256, &session, &size, &datasets); err != nil {
				return err
			}
			refs = append(refs, r)
			change.note(r.Tenant, session, -size, -1)
			if datasets != "" {
				lists[r.Tenant] = append(lists[r.Tenant], datasets)
			}
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil || len(refs) == 0 {
			return err
		}
		if err := s.dropDatasets(ctx, tx, lists); err != nil {
			return err
		}
		return change.write(ctx, tx)
	})
	return refs, err
}

// listsOf is the turn of those who add and drop a tenant's lists of datasets.
const listsOf = "lists of "

// dropDatasets drops lists that nothing names any more.
func (s *Store) dropDatasets(ctx context.Context, tx *sql.Tx, lists map[string][]string) error {
	for _, tenant := range slices.Sorted(maps.Keys(lists)) {
		if err := s.turn(ctx, tx, listsOf+tenant); err != nil {
			return err
		}
		slices.Sort(lists[tenant])
		for _, digest := range slices.Compact(lists[tenant]) {
			if _, err := tx.ExecContext(ctx, dropDatasetsQuery, tenant, digest); err != nil {
				return err
			}
		}
	}
	return nil
}

// LastArtifact is the number of the one that was added last; 0: there was none.
func (s *Store) LastArtifact(ctx context.Context) (last int64, err error) {
	if err := s.queryRow(ctx, `SELECT coalesce(max(seq), 0) FROM artifacts`).Scan(&last); err != nil {
		return 0, fmt.Errorf("find the last artifact: %w", err)
	}
	return last, nil
}

// SettleArtifacts notes that the blobs of all up to that number outlive a loss of power.
func (s *Store) SettleArtifacts(ctx context.Context, last int64) error {
	if _, err := s.change(ctx, `UPDATE artifact_settled SET seq = ?1 WHERE seq < ?1`, last); err != nil {
		return fmt.Errorf("settle artifacts: %w", err)
	}
	return nil
}

// UnsettledArtifacts are those after them, the oldest first.
func (s *Store) UnsettledArtifacts(ctx context.Context) (list []artifact.Artifact, err error) {
	query := `SELECT seq, ` + artifactColumns + ` FROM artifacts WHERE seq > (SELECT seq FROM artifact_settled) ORDER BY seq`
	err = s.queryWithin(ctx, batchTime, query, nil, func(rows *sql.Rows) error {
		a, _, err := scanArtifact(rows)
		list = append(list, a)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list unsettled artifacts: %w", err)
	}
	return list, nil
}

// ArtifactsHeld is what is kept of a tenant and of one session.
func (s *Store) ArtifactsHeld(ctx context.Context, tenant, session string) (h artifact.Held, err error) {
	err = s.query(ctx, heldQuery, []any{tenant, session}, func(rows *sql.Rows) error {
		var name string
		var bytes int64
		var files int
		if err := rows.Scan(&name, &bytes, &files); err != nil {
			return err
		}
		if name == "" {
			h.Tenant, h.TenantFiles = bytes, files
			return nil
		}
		h.Session, h.Files = bytes, files
		return nil
	})
	if err != nil {
		return h, fmt.Errorf("add up artifacts: %w", err)
	}
	return h, nil
}

// BlobNamed says whether any artifact has this content.
func (s *Store) BlobNamed(ctx context.Context, r artifact.Ref) (named bool, err error) {
	if err := s.queryRow(ctx, blobNamedQuery, r.Tenant, r.SHA256).Scan(&named); err != nil {
		return false, fmt.Errorf("look for artifacts of a blob: %w", err)
	}
	return named, nil
}

func scanArtifact(from scanner) (a artifact.Artifact, seq int64, err error) {
	var created, expires int64
	err = from.Scan(&seq, &a.ID, &a.Tenant, &a.Name, &a.Path, &a.MIME, &a.Size, &a.SHA256, &created, &expires,
		&a.Session, &a.Key, &a.Sandbox, &a.Run, &a.Cell, &a.ToolCall, &a.Source)
	if err != nil {
		return a, 0, err
	}
	a.Created, a.Expires = fromMicros(created), fromMicros(expires)
	return a, seq, nil
}

// LinkKeys are the keys of links, the newest first.
func (s *Store) LinkKeys(ctx context.Context) ([]artifact.LinkKey, error) {
	var keys []artifact.LinkKey
	err := s.query(ctx, `SELECT id, secret, created, until FROM link_keys ORDER BY seq DESC`, nil, func(rows *sql.Rows) error {
		var k artifact.LinkKey
		var secret string
		var created, until int64
		if err := rows.Scan(&k.ID, &secret, &created, &until); err != nil {
			return err
		}
		k.Secret, k.Created, k.Until = auth.Secret(secret), fromMicros(created), fromMicros(until)
		keys = append(keys, k)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list link keys: %w", err)
	}
	return keys, nil
}

// RotateLinkKey adds a key and sets until when the others count. With only, it does so only where none signs yet.
func (s *Store) RotateLinkKey(ctx context.Context, k artifact.LinkKey, others time.Time, only bool) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := s.turn(ctx, tx, "link keys"); err != nil {
			return err
		}
		if only {
			var signs bool
			if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM link_keys WHERE until = 0)`).Scan(&signs); err != nil || signs {
				return err
			}
		} else if _, err := tx.ExecContext(ctx, `UPDATE link_keys SET until = ?1 WHERE until = 0 OR until > ?1`, micros(others)); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO link_keys (id, secret, created, until) VALUES (?, ?, ?, 0)`, k.ID, string(k.Secret), micros(k.Created))
		return err
	})
	if err != nil {
		return fmt.Errorf("rotate link key: %w", err)
	}
	return nil
}

// DropLinkKeys removes keys that do not count any more.
func (s *Store) DropLinkKeys(ctx context.Context, now time.Time) error {
	if _, err := s.change(ctx, `DELETE FROM link_keys WHERE until > 0 AND until <= ?`, micros(now)); err != nil {
		return fmt.Errorf("drop link keys: %w", err)
	}
	return nil
}

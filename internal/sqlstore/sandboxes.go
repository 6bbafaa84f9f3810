package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

const columns = `id, tenant, template, template_digest, key, idempotency_key, spec_digest, boot_id, state,
	created_at, started_at, deadline, ended_at, last_used, idle_timeout, limits, metadata, network, storage,
	cause, cause_message, usage, forked_from, auto_resume, idle_action, paused_at, unspent,
	annotations, deadline_action, cold_pause, cold, resume_lifetime, mounts, server`

const (
	insertQuery = `INSERT INTO sandboxes (` + columns + `)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
		?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34)`
	stateQuery = `SELECT state, server FROM sandboxes WHERE id = ?1`
	getQuery   = `SELECT ` + columns + ` FROM sandboxes WHERE id = ?1`
	eventQuery = `INSERT INTO events (sandbox, tenant, type, at, deadline, cause, message) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)`
)

// saveQuery writes what can change in a life; the rest is not written again.
var saveQuery, saved = saving("boot_id", "state", "started_at", "deadline", "ended_at", "last_used", "idle_timeout", "limits", "metadata",
	"network", "cause", "cause_message", "usage", "auto_resume", "paused_at", "unspent", "annotations", "cold")

// saving makes the query that changes these columns, and finds the places of its arguments among those of insertQuery. The id
// and the server come first: one that a sandbox does not belong to any more changes nothing.
func saving(names ...string) (query string, places []int) {
	all := strings.Fields(strings.ReplaceAll(columns, ",", ""))
	places = append(places, slices.Index(all, "id"), slices.Index(all, "server"))
	var sets []string
	for i, name := range names {
		places = append(places, slices.Index(all, name))
		sets = append(sets, fmt.Sprintf("%s = ?%d", name, i+3))
	}
	return "UPDATE sandboxes SET " + strings.Join(sets, ", ") + " WHERE id = ?1 AND server = ?2 AND state <> 'ended'", places
}

// Insert adds a sandbox with its first events.
func (s *Store) Insert(ctx context.Context, r sandbox.Record, events ...sandbox.LifecycleEvent) error {
	return s.InsertAll(ctx, []sandbox.Entry{{Record: r, Events: events}})
}

// InsertAll adds sandboxes, all or none.
func (s *Store) InsertAll(ctx context.Context, entries []sandbox.Entry) error {
	err := s.writeAll(ctx, entries, func(ctx context.Context, tx *sql.Tx, r sandbox.Record, args []any) error {
		if _, err := tx.StmtContext(ctx, s.stmts.insert).ExecContext(ctx, args...); err != nil {
			return err
		}
		return s.withinQuota(ctx, tx, r)
	})
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "a living sandbox has the same id, key or idempotency key")
	}
	if err != nil {
		return fmt.Errorf("insert sandbox: %w", err)
	}
	return nil
}

// Save replaces a living sandbox and adds events.
func (s *Store) Save(ctx context.Context, r sandbox.Record, events ...sandbox.LifecycleEvent) error {
	return s.SaveAll(ctx, []sandbox.Entry{{Record: r, Events: events}})
}

// SaveAll replaces living sandboxes, all or none.
func (s *Store) SaveAll(ctx context.Context, entries []sandbox.Entry) error {
	err := s.writeAll(ctx, entries, func(ctx context.Context, tx *sql.Tx, r sandbox.Record, args []any) error {
		changed := make([]any, len(saved))
		for i, place := range saved {
			changed[i] = args[place]
		}
		result, err := tx.StmtContext(ctx, s.stmts.save).ExecContext(ctx, changed...)
		if err != nil {
			return err
		}
		if n, err := result.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, s.whyUnsaved(ctx, tx, r.ID))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("save sandbox: %w", err)
	}
	return nil
}

// writeAll writes rows and then their events in one transaction: whoever adds events of a tenant keeps others from doing so
// until the commit, so they come last, and tenants in the same order for everybody.
func (s *Store) writeAll(ctx context.Context, entries []sandbox.Entry, write func(ctx context.Context, tx *sql.Tx, r sandbox.Record, args []any) error) error {
	rows := make([][]any, len(entries))
	for i, e := range entries {
		var err error
		if rows[i], err = row(e.Record); err != nil {
			return err
		}
	}
	var events []sandbox.LifecycleEvent
	for _, e := range entries {
		events = append(events, e.Events...)
	}
	slices.SortStableFunc(events, func(a, b sandbox.LifecycleEvent) int { return strings.Compare(a.Tenant, b.Tenant) })
	return s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		ctx = s.brief(ctx)
		for i, e := range entries {
			if err := write(ctx, tx, e.Record, rows[i]); err != nil {
				return err
			}
		}
		return s.addEvents(ctx, tx, events)
	})
}

func (s *Store) whyUnsaved(ctx context.Context, tx *sql.Tx, id string) error {
	var state sandbox.State
	var server string
	err := tx.StmtContext(ctx, s.stmts.state).QueryRowContext(ctx, id).Scan(&state, &server)
	if errors.Is(err, sql.ErrNoRows) {
		return fault.New(fault.NotFound, "there is no sandbox %q", id)
	}
	if err != nil {
		return err
	}
	if state != sandbox.StateEnded {
		return fault.Wrap(fault.Unavailable, sandbox.ErrMoved, "sandbox %s belongs to another server now; try again", id)
	}
	return fault.New(fault.Conflict, "sandbox %s has ended", id)
}

func (s *Store) addEvents(ctx context.Context, tx *sql.Tx, events []sandbox.LifecycleEvent) error {
	for _, e := range events {
		_, err := tx.StmtContext(ctx, s.stmts.event).ExecContext(ctx,
			e.Sandbox, e.Tenant, string(e.Type), micros(e.At), micros(e.Deadline), string(e.Cause), e.Message)
		if err != nil {
			return err
		}
	}
	return nil
}

// Get finds a sandbox of any tenant.
func (s *Store) Get(ctx context.Context, id string) (sandbox.Record, error) {
	r, err := scan(s.preparedRow(ctx, s.stmts.get, id))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Record{}, fault.New(fault.NotFound, "there is no sandbox %q", id)
	}
	if err != nil {
		return sandbox.Record{}, fmt.Errorf("get sandbox: %w", err)
	}
	return r, nil
}

// Living returns every sandbox that has not ended, oldest first.
func (s *Store) Living(ctx context.Context) ([]sandbox.Record, error) {
	var records []sandbox.Record
	err := s.queryWithin(ctx, batchTime, `SELECT `+columns+` FROM sandboxes WHERE state <> 'ended' ORDER BY seq`, nil, func(rows *sql.Rows) error {
		r, err := scan(rows)
		records = append(records, r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read living sandboxes: %w", err)
	}
	return records, nil
}

// List returns a page of a tenant's sandboxes. A cursor is the time and the id of the last row of its page, which never
// change.
func (s *Store) List(ctx context.Context, tenant string, q sandbox.ListQuery) (sandbox.Page, error) {
	limit := q.Limit
	if limit <= 0 {
		limit = sandbox.DefaultPage
	}
	where, args, err := s.listWhere(tenant, q)
	if err != nil {
		return sandbox.Page{}, err
	}
	args = append(args, limit+1)
	order := "created_at DESC, id"
	if q.Ascending {
		order = "created_at, id"
	}
	page := sandbox.Page{Items: []sandbox.Sandbox{}}
	err = s.query(ctx, `SELECT `+columns+` FROM sandboxes WHERE `+where+` ORDER BY `+order+` LIMIT ?`, args, func(rows *sql.Rows) error {
		if len(page.Items) == limit { // there is one more, so there is a next page
			page.Next = cursorOf(page.Items[limit-1])
			return nil
		}
		r, err := scan(rows)
		page.Items = append(page.Items, r.Sandbox)
		return err
	})
	if err != nil {
		return sandbox.Page{}, fmt.Errorf("list sandboxes: %w", err)
	}
	return page, nil
}

func cursorOf(sb sandbox.Sandbox) string {
	return strconv.FormatInt(micros(sb.CreatedAt), 36) + "." + sb.ID
}

func parseCursor(cursor string) (at int64, id string, err error) {
	text, id, ok := strings.Cut(cursor, ".")
	at, err = strconv.ParseInt(text, 36, 64)
	if !ok || err != nil || at <= 0 || id == "" || text != strconv.FormatInt(at, 36) {
		return 0, "", fault.New(fault.Invalid, "the cursor %.40q is not one that was given out", cursor)
	}
	return at, id, nil
}

func (s *Store) listWhere(tenant string, q sandbox.ListQuery) (where string, args []any, err error) {
	terms, args := []string{"tenant = ?"}, []any{tenant}
	add := func(term string, values ...any) {
		terms = append(terms, term)
		args = append(args, values...)
	}
	if q.Cursor != "" {
		at, id, err := parseCursor(q.Cursor)
		if err != nil {
			return "", nil, err
		}
		// The first comparison is implied by the second; it is there for the index.
		if q.Ascending {
			add("created_at >= ? AND (created_at > ? OR id > ?)", at, at, id)
		} else {
			add("created_at <= ? AND (created_at < ? OR id > ?)", at, at, id)
		}
	}
	if !q.StartedAfter.IsZero() {
		add("created_at >= ?", micros(q.StartedAfter))
	}
	if len(q.States) > 0 {
		marks := make([]string, 0, len(q.States))
		for _, state := range q.States {
			marks = append(marks, "?")
			args = append(args, string(state))
		}
		terms = append(terms, "state IN ("+strings.Join(marks, ", ")+")")
	}
	if len(q.Causes) > 0 {
		marks := make([]string, 0, len(q.Causes))
		for _, cause := range q.Causes {
			marks = append(marks, "?")
			args = append(args, string(cause))
		}
		terms = append(terms, "cause IN ("+strings.Join(marks, ", ")+")")
	}
	switch {
	case q.Template == "":
	case q.TemplateIn == "":
		add("template = ?", q.Template)
	default:
		add("coalesce("+s.field("annotations")+", template) = ?", q.TemplateIn, q.Template)
	}
	if q.Key != "" {
		add("key = ?", q.Key)
	}
	if q.Without != "" {
		add(s.field("annotations")+" IS NULL", q.Without)
	}
	for _, k := range slices.Sorted(maps.Keys(q.Metadata)) {
		add(s.field("metadata")+" = ?", k, q.Metadata[k])
	}
	return strings.Join(terms, " AND "), args, nil
}

// Events returns a tenant's events after a sequence number, oldest first. The order of a tenant's numbers is the order of
// commits: SQLite has one writer, and in Postgres a trigger gives them out, one transaction of a tenant after the other. So
// whoever goes on after the last number misses nothing.
func (s *Store) Events(ctx context.Context, tenant string, q sandbox.EventQuery, limit int) ([]sandbox.LifecycleEvent, error) {
	where, args := "tenant = ? AND seq > ?", []any{tenant, q.After}
	if q.Sandbox != "" {
		where, args = where+" AND sandbox = ?", append(args, q.Sandbox)
	}
	order := "seq"
	if q.Last {
		order, limit = "seq DESC", 1
	}
	var events []sandbox.LifecycleEvent
	err := s.query(ctx, `SELECT seq, sandbox, tenant, type, at, deadline, cause, message FROM events WHERE `+where+` ORDER BY `+order+` LIMIT ?`,
		append(args, limit), func(rows *sql.Rows) error {
			var e sandbox.LifecycleEvent
			var at, deadline int64
			err := rows.Scan(&e.Seq, &e.Sandbox, &e.Tenant, &e.Type, &at, &deadline, &e.Cause, &e.Message)
			e.At, e.Deadline = fromMicros(at), fromMicros(deadline)
			events = append(events, e)
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	return events, nil
}

// pruneBatch keeps one prune from holding up a create.
const pruneBatch = 500

// Prune removes sandboxes that ended before a time, with their events.
func (s *Store) Prune(ctx context.Context, before time.Time) (total int, err error) {
	for {
		n, err := s.pruneSome(ctx, before)
		total += n
		if err != nil {
			return total, fmt.Errorf("prune sandboxes: %w", err)
		}
		if n < pruneBatch {
			return total, nil
		}
	}
}

func (s *Store) pruneSome(ctx context.Context, before time.Time) (n int, err error) {
	const chosen = `SELECT id FROM sandboxes WHERE state = 'ended' AND ended_at < ?1 ORDER BY ended_at, seq LIMIT ?2`
	err = s.inTxWithin(ctx, batchTime, func(ctx context.Context, tx *sql.Tx) error {
		if err := s.turn(ctx, tx, "prune"); err != nil { // both statements choose the same
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM events WHERE sandbox IN (`+chosen+`)`, micros(before), pruneBatch); err != nil {
			return err
		}
		result, err := tx.ExecContext(ctx, `DELETE FROM sandboxes WHERE id IN (`+chosen+`)`, micros(before), pruneBatch)
		if err != nil {
			return err
		}
		deleted, err := result.RowsAffected()
		n = int(deleted)
		return err
	})
	return n, err
}

// excessQuery is what a tenant has beyond its newest ended sandboxes.
const excessQuery = `SELECT id FROM sandboxes WHERE tenant = ?1 AND state = 'ended' ORDER BY ended_at DESC, seq DESC LIMIT ?2 OFFSET ?3`

// PruneTenant removes the ended sandboxes of a tenant, with their events, but the newest.
func (s *Store) PruneTenant(ctx context.Context, tenant string, keep int) (total int, err error) {
	var ids []any
	// The reader chooses, because that takes long: what has ended is changed by no other writer.
	err = s.queryWithin(ctx, batchTime, excessQuery, []any{tenant, math.MaxInt32, keep}, func(rows *sql.Rows) error {
		var id string
		err := rows.Scan(&id)
		ids = append(ids, id)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("find ended sandboxes of tenant %s: %w", tenant, err)
	}
	slices.Reverse(ids) // the oldest first
	for batch := range slices.Chunk(ids, pruneBatch) {
		n, err := s.pruneThese(ctx, batch)
		total += n
		if err != nil {
			return total, fmt.Errorf("prune sandboxes of tenant %s: %w", tenant, err)
		}
	}
	return total, nil
}

func (s *Store) pruneThese(ctx context.Context, ids []any) (n int, err error) {
	in := ` IN (?` + strings.Repeat(", ?", len(ids)-1) + `)`
	err = s.inTxWithin(ctx, batchTime, func(ctx context.Context, tx *sql.Tx) error {
		if err := s.turn(ctx, tx, "prune"); err != nil { // another server may have chosen the same
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM events WHERE sandbox`+in, ids...); err != nil {
			return err
		}
		result, err := tx.ExecContext(ctx, `DELETE FROM sandboxes WHERE state = 'ended' AND id`+in, ids...)
		if err != nil {
			return err
		}
		deleted, err := result.RowsAffected()
		n = int(deleted)
		return err
	})
	return n, err
}

// row is a record as the arguments of insertQuery; saveQuery has some of them.
func row(r sandbox.Record) ([]any, error) {
	var texts [6]string
	for i, v := range []any{r.Limits, r.Metadata, r.Network, r.Usage, r.Annotations, r.Mounts} {
		b, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("encode sandbox %s: %w", r.ID, err)
		}
		texts[i] = withoutNUL(string(b))
	}
	return []any{
		r.ID, r.Tenant, r.Template, r.TemplateDigest, r.Key, r.IdempotencyKey, r.SpecDigest, r.BootID, string(r.State),
		micros(r.CreatedAt), micros(r.StartedAt), micros(r.Deadline), micros(r.EndedAt), micros(r.LastUsed), int64(r.IdleTimeout),
		texts[0], texts[1], texts[2], string(r.Storage), string(r.Cause), r.CauseMessage, texts[3],
		r.ForkedFrom, r.AutoResume, string(r.IdleAction), micros(r.PausedAt), int64(r.Unspent),
		texts[4], string(r.DeadlineAction), r.ColdPause, r.Cold, int64(r.ResumeLifetime), texts[5], r.Server,
	}, nil
}

func scan(from scanner) (sandbox.Record, error) {
	var r sandbox.Record
	var created, started, deadline, ended, used, idle, paused int64
	var limits, metadata, network, usage, annotations, mounts []byte
	err := from.Scan(&r.ID, &r.Tenant, &r.Template, &r.TemplateDigest, &r.Key, &r.IdempotencyKey, &r.SpecDigest, &r.BootID, &r.State,
		&created, &started, &deadline, &ended, &used, &idle, &limits, &metadata, &network, &r.Storage,
		&r.Cause, &r.CauseMessage, &usage, &r.ForkedFrom, &r.AutoResume, &r.IdleAction, &paused, &r.Unspent,
		&annotations, &r.DeadlineAction, &r.ColdPause, &r.Cold, &r.ResumeLifetime, &mounts, &r.Server)
	if err != nil {
		return sandbox.Record{}, err
	}
	r.CreatedAt, r.StartedAt, r.Deadline = fromMicros(created), fromMicros(started), fromMicros(deadline)
	r.EndedAt, r.LastUsed, r.IdleTimeout = fromMicros(ended), fromMicros(used), time.Duration(idle)
	r.PausedAt = fromMicros(paused)
	for _, f := range []struct {
		text []byte
		to   any
	}{{limits, &r.Limits}, {metadata, &r.Metadata}, {network, &r.Network}, {usage, &r.Usage}, {annotations, &r.Annotations}, {mounts, &r.Mounts}} {
		if err := json.Unmarshal(f.text, f.to); err != nil {
			return sandbox.Record{}, fmt.Errorf("decode sandbox %s: %w", r.ID, err)
		}
	}
	return r, nil
}

// withoutNUL puts U+FFFD in the place of each NUL of a JSON text, as its encoder does with what is not UTF-8: one of them would
// fail every listing of its tenant that looks into the column, since Postgres has no such text.
func withoutNUL(text string) string {
	if !strings.Contains(text, `\u0000`) {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] != '\\':
			b.WriteByte(text[i])
		case strings.HasPrefix(text[i:], `\u0000`):
			b.WriteString(`\ufffd`)
			i += len(`\u0000`) - 1
		default:
			b.WriteString(text[i : i+2]) // an encoder ends no text with half an escape
			i++
		}
	}
	return b.String()
}

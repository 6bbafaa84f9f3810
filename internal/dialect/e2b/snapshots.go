package e2b

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// snapshots is the kind of document that says which snapshots a tenant has. One with a name is kept under "name:tag", so
// that the next of that name takes its place; one without, under its template.
const snapshots = "e2b.snapshot"

// snapshotPrefix begins the template of every snapshot.
const snapshotPrefix = "snap-"

const defaultTag = "default"

// snapshot is one such document.
type snapshot struct {
	ID       string         `json:"id"`       // as a template; it stays when the name moves on
	Template string         `json:"template"` // of the domain
	Name     string         `json:"name,omitempty"`
	Sandbox  string         `json:"sandbox"` // of which it was made
	Created  time.Time      `json:"created"`
	From     build.Resolved `json:"from"` // its sandbox's template: what that gives at a start, the snapshot gives
}

func (s snapshot) key() string { return cmp.Or(s.Name, s.Template) }

// SnapshotRequest is the body of POST …/snapshots.
type SnapshotRequest struct {
	Name   string `json:"name"`
	Memory *bool  `json:"memory"`
}

// SnapshotInfo is a snapshot as E2B shows it.
type SnapshotInfo struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func wireSnapshot(tenant string, s snapshot) SnapshotInfo {
	if s.Name == "" {
		return SnapshotInfo{SnapshotID: s.Template + ":" + defaultTag, Names: []string{}}
	}
	full := build.Namespace(tenant) + "/" + s.Name
	return SnapshotInfo{SnapshotID: full, Names: []string{full}}
}

func (a *API) snapshot(c *call) error {
	var req SnapshotRequest
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.Memory != nil && *req.Memory {
		return fault.New(fault.Unsupported, "a snapshot keeps files and no memory here; leave out memory, or make it false")
	}
	name := snapshotPrefix + strings.ToLower(rand.Text()[:20])
	s := snapshot{ID: name, Template: name, Sandbox: c.id, Created: time.Now().UTC()}
	if req.Name != "" {
		var err error
		if s.Name, err = ParseName(c.who.Tenant, req.Name); err != nil {
			return err
		}
	}
	sb, err := a.find(c)
	if err != nil {
		return err
	}
	o, err := target.Decode(sb)
	if err != nil {
		return err
	}
	if s.From, err = a.origin(c, o); err != nil {
		return err
	}

	if err := a.makeSnapshot(c.ctx(), c.who, s); err != nil {
		return err
	}

	return c.answer(http.StatusCreated, wireSnapshot(c.who.Tenant, s))
}

// origin is what a sandbox's template gives its sandboxes beyond its files; one that is gone gives nothing any more.
func (a *API) origin(c *call, o target.Options) (build.Resolved, error) {
	from, err := a.Resolve(c.ctx(), c.who, o.TemplateID)
	if fault.Is(err, fault.NotFound) {
		return build.Resolved{}, nil
	}
	return from, err
}

var (
	nameForm = regexp.MustCompile(`^[a-z0-9_-]{1,128}$`)
	tagForm  = regexp.MustCompile(`^[a-z0-9_.-]{1,128}$`)
)

// ParseName reads a snapshot's name, with or without its namespace and its tag, as "name:tag".
func ParseName(tenant, text string) (string, error) {
	rest := text
	if namespace, name, ok := strings.Cut(text, "/"); ok {
		if own := build.Namespace(tenant); namespace != own {
			return "", fault.New(fault.Denied, "%.80q is not a name of yours: your namespace is %s", text, own)
		}
		rest = name
	}
	name, tag, tagged := strings.Cut(rest, ":")
	if !tagged {
		tag = defaultTag
	}
	if !nameForm.MatchString(name) || !tagForm.MatchString(tag) {
		return "", fault.New(fault.Invalid, "snapshot name %.80q: use lowercase letters, digits, - and _, and a tag behind a colon if you like", text)
	}
	return name + ":" + tag, nil
}

// unnamed reports whether a templateID has the form of a snapshot's own.
func unnamed(ref string) bool { return strings.HasPrefix(ref, snapshotPrefix) }

var noSnapshot = fault.New(fault.NotFound, "there is no such template or snapshot")

// lookUp finds a snapshot by whatever E2B calls it, or fault.NotFound.
func (a *API) lookUp(ctx context.Context, who auth.Principal, ref string) (snapshot, error) {
	if unnamed(ref) {
		if s, err := a.byID(ctx, who, strings.TrimSuffix(ref, ":"+defaultTag)); !fault.Is(err, fault.NotFound) {
			return s, err
		}
	}
	name, err := ParseName(who.Tenant, ref)
	if err != nil {
		return snapshot{}, noSnapshot
	}
	return a.document(ctx, who, name)
}

// byID finds a snapshot by its id as a template, which one without a name is kept under.
func (a *API) byID(ctx context.Context, who auth.Principal, id string) (snapshot, error) {
	s, err := a.document(ctx, who, id)
	if !fault.Is(err, fault.NotFound) {
		return s, err
	}
	all, err := a.allSnapshots(ctx, who)
	if err != nil {
		return snapshot{}, err
	}
	if i := slices.IndexFunc(all, func(s snapshot) bool { return s.ID == id }); i >= 0 {
		return all[i], nil
	}
	return snapshot{}, noSnapshot
}

func (a *API) document(ctx context.Context, who auth.Principal, key string) (snapshot, error) {
	body, err := a.documents.Document(ctx, who.Tenant, snapshots, key)
	if fault.Is(err, fault.NotFound) {
		return snapshot{}, noSnapshot
	}
	if err != nil {
		return snapshot{}, fmt.Errorf("read snapshot %s: %w", key, err)
	}
	var s snapshot
	if err := json.Unmarshal(body, &s); err != nil {
		return snapshot{}, fmt.Errorf("snapshot %s: %w", key, err)
	}
	return s, nil
}

// snapshotAsTemplate is a snapshot as what a sandbox starts from.
func (a *API) snapshotAsTemplate(ctx context.Context, who auth.Principal, ref string) (build.Resolved, error) {
	s, err := a.lookUp(ctx, who, ref)
	if err != nil {
		return build.Resolved{}, err
	}
	from := s.From
	from.Template, from.ID = s.Template, s.ID
	from.Alias, _, _ = strings.Cut(s.Name, ":")
	return from, nil
}

// removeTemplate removes a snapshot, or lets the builder remove a template. Either may be what kept another one's files.
func (a *API) removeTemplate(c *call) error {
	ctx := context.WithoutCancel(c.ctx())
	s, err := a.lookUp(c.ctx(), c.who, c.r.PathValue("template"))
	if fault.Is(err, fault.NotFound) {
		err = a.build(c)
		a.tidy(ctx, c.who)
		return err
	}
	if err != nil {
		return err
	}

	err = a.sandboxes.RemoveTemplate(ctx, c.who, s.Template)
	stays := fault.Is(err, fault.Conflict) // templates that were built from it need its files, and nobody its name
	if err != nil && !stays && !fault.Is(err, fault.NotFound) {
		return err
	}
	if err := a.dropName(ctx, c.who, s, stays); err != nil {
		return fmt.Errorf("forget snapshot %s: %w", s.key(), err)
	}
	a.tidy(ctx, c.who)

	return c.nothing()
}

// dropName forgets a snapshot, unless its name has moved on meanwhile. Files that stay for now are doomed.
func (a *API) dropName(ctx context.Context, who auth.Principal, s snapshot, stays bool) error {
	a.naming.Lock()
	defer a.naming.Unlock()
	now, err := a.document(ctx, who, s.key())
	if fault.Is(err, fault.NotFound) || err == nil && now.Template != s.Template {
		return nil
	}
	if err == nil && stays {
		err = a.doom(ctx, who, s.Template)
	}
	if err == nil {
		err = a.documents.DeleteDocument(ctx, who.Tenant, snapshots, s.key())
	}
	return err
}

func (a *API) listSnapshots(c *call) error {
	q := c.query()
	limit, after := int(q.integer("limit", maxPage, 1, maxPage)), q.place("nextToken")
	of, name := q.Get("sandboxID"), q.Get("name")
	if of != "" {
		var err error
		if of, err = sandboxID(of); err != nil {
			return err
		}
	}
	if q.err != nil {
		return q.err
	}

	a.tidyOnce(c.ctx(), c.who)
	all, err := a.allSnapshots(c.ctx(), c.who)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(s snapshot) bool {
		return of != "" && s.Sandbox != of || name != "" && !s.called(c.who.Tenant, name) || after != "" && place(s) <= after
	})

	if len(all) > limit {
		all = all[:limit]
		c.w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(place(all[limit-1]))))
	}
	out := make([]SnapshotInfo, 0, len(all))
	for _, s := range all {
		out = append(out, wireSnapshot(c.who.Tenant, s))
	}
	return c.answer(http.StatusOK, out)
}

// allSnapshots are a tenant's, newest first.
func (a *API) allSnapshots(ctx context.Context, who auth.Principal) ([]snapshot, error) {
	docs, err := a.documents.Documents(ctx, who.Tenant, snapshots)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	all := make([]snapshot, 0, len(docs))
	for _, d := range docs {
		var s snapshot
		if err := json.Unmarshal(d.Body, &s); err != nil {
			return nil, fmt.Errorf("snapshot %s: %w", d.ID, err)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(x, y snapshot) int { return strings.Compare(place(x), place(y)) })
	return all, nil
}

// called reports whether a snapshot has a name; one that says no tag means every tag.
func (s snapshot) called(tenant, text string) bool {
	want, err := ParseName(tenant, text)
	if err != nil {
		return false
	}
	if strings.Contains(text, ":") {
		return s.Name == want
	}
	name, _, _ := strings.Cut(want, ":")
	return strings.HasPrefix(s.Name, name+":")
}

// place orders snapshots, newest first and then by id, and says where a page ends.
func place(s snapshot) string {
	return fmt.Sprintf("%020d %s", uint64(1<<63)-uint64(s.Created.UnixNano()), s.key())
}

// place reads a token that an earlier page gave out.
func (q *query) place(name string) string {
	b, err := base64.RawURLEncoding.DecodeString(q.Get(name))
	if err != nil {
		q.fail("query parameter %s is not what an earlier page gave out", name)
	}
	return string(b)
}

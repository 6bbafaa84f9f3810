package build

import (
	"cmp"
	"context"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// shown is a template as listings show it. Nobody but its tenant can use one, so none is public but the operator's.
type shown struct {
	TemplateID    string     `json:"templateID"`
	BuildID       string     `json:"buildID"`
	CPUCount      int        `json:"cpuCount"`
	MemoryMB      int64      `json:"memoryMB"`
	DiskSizeMB    int64      `json:"diskSizeMB"`
	Public        bool       `json:"public"`
	Aliases       []string   `json:"aliases"`
	Names         []string   `json:"names"`
	CreatedAt     time.Time  `json:"createdAt"`
	UpdatedAt     time.Time  `json:"updatedAt"`
	CreatedBy     *struct{}  `json:"createdBy"` // keys have no person
	LastSpawnedAt *time.Time `json:"lastSpawnedAt"`
	SpawnCount    int        `json:"spawnCount"`
	BuildCount    int        `json:"buildCount"`
	EnvdVersion   string     `json:"envdVersion"`
	BuildStatus   Status     `json:"buildStatus"`
	IsDefault     bool       `json:"isDefault,omitempty"`
	Description   string     `json:"description,omitempty"`
}

// shownBuild is a build as its template shows it.
type shownBuild struct {
	BuildID     string     `json:"buildID"`
	Status      Status     `json:"status"`
	CreatedAt   time.Time  `json:"createdAt"`
	UpdatedAt   time.Time  `json:"updatedAt"`
	FinishedAt  *time.Time `json:"finishedAt,omitempty"`
	CPUCount    int        `json:"cpuCount"`
	MemoryMB    int64      `json:"memoryMB"`
	DiskSizeMB  int64      `json:"diskSizeMB"`
	EnvdVersion string     `json:"envdVersion"`
}

// sizes are limits as listings show them.
func (b *Builder) sizes(l template.Limits) (cpus int, memory, disk int64) {
	cpus = int(math.Ceil(cmp.Or(l.CPUs, b.cfg.Limits.CPUs, 1)))
	return cpus, cmp.Or(l.MemoryBytes, b.cfg.Limits.MemoryBytes) >> 20, cmp.Or(l.DiskBytes, b.cfg.Limits.DiskBytes) >> 20
}

// show is a template with its builds, newest first, as listings show it.
func (b *Builder) show(s *shelf, e *entry, builds []*made) shown {
	out := shown{
		TemplateID: e.ID, Aliases: []string{e.Alias}, Names: s.names(e), CreatedAt: e.Created, UpdatedAt: e.Updated,
		BuildCount: e.Builds, EnvdVersion: b.cfg.EnvdVersion, BuildStatus: StatusWaiting,
	}
	if u := s.useOf(e.ID); u.count > 0 {
		out.SpawnCount, out.LastSpawnedAt = u.count, &u.last
	}
	if len(builds) == 0 {
		out.CPUCount, out.MemoryMB, out.DiskSizeMB = b.sizes(template.Limits{})
		return out
	}
	newest := builds[0]
	out.BuildStatus = newest.Status
	if i := slices.IndexFunc(builds, func(m *made) bool { return m.Status == StatusReady }); i >= 0 {
		newest = builds[i]
	}
	out.BuildID = newest.ID
	out.CPUCount, out.MemoryMB, out.DiskSizeMB = b.sizes(newest.Limits)
	return out
}

// operators are the templates that everybody has.
func (b *Builder) operators(ctx context.Context, tenant string) []shown {
	var out []shown
	for _, info := range b.templates.List(tenant) {
		if info.Tenant != "" || info.Digest == "" { // a snapshot of somebody's, or not built
			continue
		}
		t, err := b.templates.Resolve(ctx, tenant, info.Name)
		if err != nil {
			continue // it cannot be used now
		}
		out = append(out, b.showOperators(info.Name, t))
	}
	return out
}

func (b *Builder) showOperators(name string, t *template.Template) shown {
	public := publicName(name)
	out := shown{
		TemplateID: public, BuildID: nilUUID, Public: true, Aliases: []string{public}, Names: []string{public}, EnvdVersion: b.cfg.EnvdVersion,
		BuildStatus: StatusReady, IsDefault: true, Description: t.Description, CreatedAt: time.Unix(0, 0).UTC(), UpdatedAt: time.Unix(0, 0).UTC(),
	}
	out.CPUCount, out.MemoryMB, out.DiskSizeMB = b.sizes(t.Limits)
	return out
}

// nilUUID is the build of a template that no client has built.
const nilUUID = "00000000-0000-0000-0000-000000000000"

func (b *Builder) listTemplates(c *call) error {
	all, builds := []shown{}, c.s.buildsByTemplate()
	for _, e := range c.s.all() {
		all = append(all, b.show(c.s, e, builds[e.ID]))
	}
	all = append(all, b.operators(c.r.Context(), c.who.Tenant)...)

	page, next, err := c.page(len(all))
	if err != nil {
		return err
	}
	if next != "" {
		c.w.Header().Set("X-Next-Token", next)
	}
	return c.answer(http.StatusOK, all[page[0]:page[1]])
}

// page is which of n things an answer has: all of them, unless the caller sets a limit.
func (c *call) page(n int) (bounds [2]int, next string, err error) {
	limit, err := c.number("limit", math.MaxInt32, 1, math.MaxInt32)
	if err != nil {
		return bounds, "", err
	}
	from, err := c.number("nextToken", 0, 0, math.MaxInt32)
	if err != nil {
		return bounds, "", fault.New(fault.Invalid, "invalid next token")
	}
	bounds[0] = min(int(from), n)
	bounds[1] = min(bounds[0]+int(limit), n)
	if bounds[1] < n {
		next = strconv.Itoa(bounds[1])
	}
	return bounds, next, nil
}

func (b *Builder) listDefaults(c *call) error {
	return c.answer(http.StatusOK, orEmpty(b.operators(c.r.Context(), c.who.Tenant)))
}

func (b *Builder) getTemplate(c *call) error {
	type answer struct {
		shown
		Builds []shownBuild `json:"builds"`
	}
	e, err := c.template()
	if fault.Is(err, fault.NotFound) {
		name, t, domainErr := b.everybodys(c.r.Context(), c.who, c.vars["id"])
		if domainErr != nil {
			return err
		}
		return c.answer(http.StatusOK, answer{b.showOperators(name, t), []shownBuild{}})
	}
	if err != nil {
		return err
	}

	builds := c.s.buildsOf(e.ID)
	page, next, err := c.page(len(builds))
	if err != nil {
		return err
	}
	out := answer{b.show(c.s, e, builds), []shownBuild{}}
	for _, m := range builds[page[0]:page[1]] {
		out.Builds = append(out.Builds, b.showBuild(m))
	}
	if next != "" {
		c.w.Header().Set("X-Next-Token", next)
	}
	return c.answer(http.StatusOK, out)
}

func (b *Builder) showBuild(m *made) shownBuild {
	out := shownBuild{BuildID: m.ID, Status: m.Status, CreatedAt: m.Created, UpdatedAt: m.Updated, EnvdVersion: b.cfg.EnvdVersion}
	out.CPUCount, out.MemoryMB, out.DiskSizeMB = b.sizes(m.Limits)
	if !m.Finished.IsZero() {
		out.FinishedAt = &m.Finished
	}
	return out
}

// everybodys is a template that the operator built.
func (b *Builder) everybodys(ctx context.Context, who auth.Principal, text string) (string, *template.Template, error) {
	r, err := parseRef(text)
	if err != nil {
		return "", nil, err
	}
	name := cmp.Or(builtIn[r.name], r.name)
	t, err := b.templates.Resolve(ctx, who.Tenant, name)
	if err == nil && (t.Tenant != "" || r.namespace != "") {
		err = errNoTemplate(text)
	}
	return name, t, err
}

func (b *Builder) alias(c *call) error {
	e, err := c.template()
	if err == nil {
		return c.answer(http.StatusOK, map[string]any{"templateID": e.ID, "public": false})
	}
	if name, _, domainErr := b.everybodys(c.r.Context(), c.who, c.vars["id"]); domainErr == nil {
		return c.answer(http.StatusOK, map[string]any{"templateID": publicName(name), "public": true})
	}
	return err
}

// publish answers with the template's names. Templates stay with their tenant.
func (b *Builder) publish(c *call) error {
	var q struct {
		Public *bool `json:"public"`
	}
	if err := c.decode(&q); err != nil {
		return err
	}
	e, err := c.template()
	if err != nil {
		return err
	}
	if q.Public != nil && *q.Public {
		return fault.New(fault.Unsupported, "templates of this server belong to whoever built them and cannot be published; give others the Dockerfile, or build them as the operator")
	}
	return c.answer(http.StatusOK, map[string]any{"names": c.s.names(e)})
}

func (b *Builder) deleteTemplate(c *call) error {
	e, err := c.template()
	if err != nil {
		return b.notYours(c, c.vars["id"], "remove", err)
	}

	gone := fault.New(fault.Gone, "the template was deleted while it was being built")
	for _, j := range b.queue.drop(e.ID, gone) {
		b.end(j, nil, gone)
	}
	left, err := c.s.remove(c.r.Context(), e.ID)
	// What was made of it goes also when the client has left.
	b.discard(context.WithoutCancel(c.r.Context()), c.who, c.s, left...)
	if err != nil {
		return err
	}

	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// notYours says of a template that the caller does not have whether it is everybody's.
func (b *Builder) notYours(c *call, text, verb string, err error) error {
	if !fault.Is(err, fault.NotFound) {
		return err
	}
	if _, _, domainErr := b.everybodys(c.r.Context(), c.who, text); domainErr != nil {
		return err
	}
	return fault.New(fault.Denied, "template '%s' is the server's; only its operator can %s it", text, verb)
}

type tagsRequest struct {
	Target string   `json:"target"` // of an assignment: name[:tag]
	Name   string   `json:"name"`   // of a removal
	Tags   []string `json:"tags"`
}

// decodeTags reads a request about tags of a template of the caller's.
func (b *Builder) decodeTags(c *call) (q tagsRequest, r ref, e *entry, err error) {
	if err = c.decode(&q); err != nil {
		return
	}
	name := cmp.Or(q.Target, q.Name)
	if r, err = parseRef(name); err != nil {
		return
	}
	if q.Tags, err = parseTags(q.Tags); err != nil {
		return
	}
	if len(q.Tags) == 0 {
		err = fault.New(fault.Invalid, "at least one tag is needed")
		return
	}
	if e = c.s.find(r); e == nil {
		err = b.notYours(c, name, "tag", errNoTemplate(name))
	}
	return
}

func (b *Builder) assignTags(c *call) error {
	q, r, e, err := b.decodeTags(c)
	if err != nil {
		return err
	}

	build := ""
	orphans, err := c.s.changeTags(c.r.Context(), e.ID, func(tags map[string]tag) error {
		from, ok := tags[cmp.Or(r.tag, defaultTag)]
		if !ok {
			return errNoTag(cmp.Or(r.tag, defaultTag), e.Alias)
		}
		if len(tags)+len(q.Tags) > 4*maxTags {
			return fault.New(fault.Exhausted, "template '%s' has %d tags; remove some first", e.Alias, len(tags))
		}
		build = from.Build
		for _, name := range q.Tags {
			tags[name] = tag{build, now()}
		}
		return nil
	})
	b.discard(context.WithoutCancel(c.r.Context()), c.who, c.s, orphans...)
	if err != nil {
		return err
	}

	return c.answer(http.StatusCreated, map[string]any{"tags": q.Tags, "buildID": build})
}

func (b *Builder) removeTags(c *call) error {
	q, _, e, err := b.decodeTags(c)
	if err != nil {
		return err
	}
	if slices.Contains(q.Tags, defaultTag) {
		return fault.New(fault.Invalid, "the tag '%s' cannot be removed", defaultTag)
	}

	orphans, err := c.s.changeTags(c.r.Context(), e.ID, func(tags map[string]tag) error {
		for _, name := range q.Tags {
			if _, ok := tags[name]; !ok {
				return errNoTag(name, e.Alias)
			}
			delete(tags, name)
		}
		return nil
	})
	b.discard(context.WithoutCancel(c.r.Context()), c.who, c.s, orphans...)
	if err != nil {
		return err
	}

	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// tags are those of a template of the caller's. What everybody has was built by no client, and has one.
func (b *Builder) tags(c *call) (map[string]tag, error) {
	e, err := c.template()
	if err == nil {
		return e.Tags, nil
	}
	if name, t, domainErr := b.everybodys(c.r.Context(), c.who, c.vars["id"]); domainErr == nil {
		shown := b.showOperators(name, t)
		return map[string]tag{defaultTag: {Build: shown.BuildID, At: shown.CreatedAt}}, nil
	}
	return nil, err
}

func (b *Builder) listTags(c *call) error {
	tags, err := b.tags(c)
	if err != nil {
		return err
	}
	type shownTag struct {
		Tag       string    `json:"tag"`
		BuildID   string    `json:"buildID"`
		CreatedAt time.Time `json:"createdAt"`
	}
	out := []shownTag{}
	for _, name := range slices.Sorted(maps.Keys(tags)) {
		out = append(out, shownTag{name, tags[name].Build, tags[name].At})
	}
	return c.answer(http.StatusOK, out)
}

func (b *Builder) countTags(c *call) error {
	tags, err := b.tags(c)
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, map[string]any{"total": len(tags)})
}

func (b *Builder) tagExists(c *call) error {
	has, err := b.tags(c)
	if err != nil {
		return err
	}
	tags, err := parseTags(c.r.URL.Query()["tag"])
	if err != nil {
		return err
	}
	if len(tags) != 1 {
		return fault.New(fault.Invalid, "the query parameter tag is needed, once")
	}
	_, ok := has[tags[0]]
	return c.answer(http.StatusOK, map[string]any{"exists": ok, "normalizedTag": tags[0]})
}

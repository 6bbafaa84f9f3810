package build

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// What one build may ask for.
const (
	maxSteps = 1000
	maxArgs  = 2000
	maxCPUs  = 1024
	maxMB    = 1 << 24

	maxCommand = 32 << 10 // bytes of what is started, and of what tells that it is ready
	maxFrom    = 1 << 10  // bytes of an image's or a template's name
)

// buildRequest asks for a new build of a template.
type buildRequest struct {
	Name          string   `json:"name"`
	Alias         string   `json:"alias"` // what name was called before
	Tags          []string `json:"tags"`
	CPUCount      *int64   `json:"cpuCount"`
	MemoryMB      *int64   `json:"memoryMB"`
	MinFreeDiskMB *int64   `json:"minFreeDiskMB"`
}

// plan is what the request means: the template's name, the tags of the build, and what its sandboxes get.
func (q buildRequest) plan() (name string, tags []string, limits template.Limits, err error) {
	text := q.Name
	if text == "" {
		text = q.Alias
	}
	r, err := parseRef(text)
	if err != nil {
		return "", nil, limits, err
	}
	if tags, err = parseTags(q.Tags); err != nil {
		return "", nil, limits, err
	}
	if r.tag != "" && !slices.Contains(tags, r.tag) {
		tags = append([]string{r.tag}, tags...)
	}
	if len(tags) == 0 {
		tags = []string{defaultTag}
	}
	if r.namespace != "" {
		r.name = r.namespace + "/" + r.name // whose it is only the caller knows
	}
	limits, err = q.limits()
	return r.name, tags, limits, err
}

func (q buildRequest) limits() (l template.Limits, err error) {
	if n := q.CPUCount; n != nil && *n != 0 {
		if *n < 1 || *n > maxCPUs || *n != 1 && *n%2 != 0 {
			return l, fault.New(fault.Invalid, "CPU count must be 1 or an even number, not %d", *n)
		}
		l.CPUs = float64(*n)
	}
	if n := q.MemoryMB; n != nil && *n != 0 {
		if *n < 128 || *n > maxMB || *n%2 != 0 {
			return l, fault.New(fault.Invalid, "memory must be an even number of MiB and at least 128, not %d", *n)
		}
		l.MemoryBytes = *n << 20
	}
	if n := q.MinFreeDiskMB; n != nil {
		if *n < 0 || *n > maxMB {
			return l, fault.New(fault.Invalid, "the minimum of free disk must be a number of MiB from 0 on, not %d", *n)
		}
		l.DiskBytes = *n << 20
	}
	return l, nil
}

func (b *Builder) requestBuild(c *call) error {
	var q buildRequest
	if err := c.decode(&q); err != nil {
		return err
	}
	name, tags, limits, err := q.plan()
	if err != nil {
		return err
	}
	if caps := b.sandboxes.Caps(); !caps.Snapshot {
		return fault.New(fault.Unsupported, "the %s driver cannot make templates of sandboxes; the server's operator names templates in its configuration", caps.Name)
	}
	if ns, alias, ok := strings.Cut(name, "/"); ok {
		if ns != Namespace(c.who.Tenant) {
			return fault.New(fault.Denied, "the namespace '%s' is not yours; yours is '%s'", ns, Namespace(c.who.Tenant))
		}
		name = alias
	}
	if limits.DiskBytes <= b.cfg.Limits.DiskBytes { // every sandbox has that much
		limits.DiskBytes = 0
	}

	if err := c.s.makeRoom(c.r.Context(), maxTenantBuilds-1); err != nil {
		return err
	}
	e, m, err := c.s.request(c.r.Context(), name, tags, limits)
	if err != nil {
		return err
	}

	return c.answer(http.StatusAccepted, map[string]any{
		"templateID": e.ID, "buildID": m.ID, "public": false, "names": c.s.names(e), "aliases": []string{e.Alias}, "tags": m.Tags,
	})
}

// names are the public names of a template.
func (s *shelf) names(e *entry) []string { return []string{Namespace(s.tenant) + "/" + e.Alias} }

// startRequest holds the steps of a build.
type startRequest struct {
	FromImage    string `json:"fromImage"`
	FromTemplate string `json:"fromTemplate"`
	Login        *login `json:"fromImageRegistry"` // dropped when the image is there
	Force        bool   `json:"force"`             // without the cache
	Steps        []step `json:"steps"`
	StartCmd     string `json:"startCmd"`
	ReadyCmd     string `json:"readyCmd"`
}

// step is one instruction of a template.
type step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"`
	Force     bool     `json:"force"` // it and those after it without the cache
}

// The kinds of steps.
const (
	stepRun     = "RUN"
	stepCopy    = "COPY"
	stepAdd     = "ADD"
	stepEnv     = "ENV"
	stepArg     = "ARG"
	stepWorkdir = "WORKDIR"
	stepUser    = "USER"
)

func (q *startRequest) validate() error {
	if (q.FromImage == "") == (q.FromTemplate == "") {
		return fault.New(fault.Invalid, "a build starts from an image or from a template: give fromImage or fromTemplate")
	}
	if len(q.FromImage) > maxFrom || len(q.FromTemplate) > maxFrom {
		return fault.New(fault.Invalid, "the name of what a build starts from is longer than %d bytes", maxFrom)
	}
	if err := q.Login.validate(); err != nil {
		return err
	}
	if len(q.Steps) > maxSteps {
		return fault.New(fault.Invalid, "%d steps are too many; at most %d are allowed", len(q.Steps), maxSteps)
	}
	for i := range q.Steps {
		s := &q.Steps[i]
		s.Type = strings.ToUpper(s.Type)
		if len(s.Args) > maxArgs {
			return fault.New(fault.Invalid, "step %d has too many arguments", i+1)
		}
		for _, a := range s.Args {
			if strings.ContainsRune(a, 0) {
				return fault.New(fault.Invalid, "step %d holds a zero byte", i+1)
			}
		}
		if s.FilesHash != "" && !hashForm.MatchString(s.FilesHash) {
			return fault.New(fault.Invalid, "step %d: the hash of its files is malformed", i+1)
		}
	}
	return q.validateCommands()
}

func (q *startRequest) validateCommands() error {
	if len(q.StartCmd) > maxCommand || len(q.ReadyCmd) > maxCommand {
		return fault.New(fault.Invalid, "startCmd and readyCmd may have %d bytes each; put more into a file", maxCommand)
	}
	if strings.ContainsRune(q.StartCmd+q.ReadyCmd, 0) {
		return fault.New(fault.Invalid, "a command holds a zero byte")
	}
	return nil
}

// size is about how many bytes of memory the request takes: many empty arguments take more than their text does.
func (q *startRequest) size() int {
	const header = 16 // of a string
	n := len(q.FromImage) + len(q.FromTemplate) + len(q.StartCmd) + len(q.ReadyCmd)
	if q.Login != nil {
		n += len(q.Login.Username) + len(q.Login.Password) + len(q.Login.ServiceAccount)
	}
	for _, s := range q.Steps {
		n += 4*header + len(s.Type) + len(s.FilesHash)
		for _, a := range s.Args {
			n += header + len(a)
		}
	}
	return n
}

func (b *Builder) startBuild(c *call) error {
	m, err := c.build()
	if err != nil {
		return err
	}
	var q startRequest
	if err := c.decode(&q); err != nil {
		return err
	}
	if err := q.validate(); err != nil {
		return err
	}

	// Whether the client stays or not, what it started goes on.
	ctx := context.WithoutCancel(c.r.Context())
	_, err = c.s.changeBuild(ctx, m.ID, func(m *made) error {
		if m.Started {
			return fault.New(fault.Invalid, "build '%s' was started before; ask for a new one", m.ID)
		}
		m.Started = true
		return nil
	})
	if err != nil {
		return err
	}
	if err := b.enqueue(c, m, q); err != nil {
		return err
	}

	c.w.WriteHeader(http.StatusAccepted)
	return nil
}

func (b *Builder) enqueue(c *call, m *made, q startRequest) error {
	e, err := c.template()
	if err != nil {
		return err
	}
	j := &job{who: c.who, shelf: c.s, template: e.ID, alias: e.Alias, build: m.ID, want: q, book: b.openBook(m.ID)}
	j.ctx, j.cancel = context.WithCancelCause(b.life)
	j.book.say(levelInfo, "", "Building template "+e.ID+"/"+m.ID)
	if err := b.queue.add(j); err != nil {
		b.end(j, nil, err)
		return err
	}
	return nil
}

func (b *Builder) fileLink(c *call) error {
	e, err := c.template()
	if err != nil {
		return err
	}
	hash := c.vars["hash"]
	if !hashForm.MatchString(hash) {
		return fault.New(fault.Invalid, "the hash of files must be 16 to 128 letters and digits")
	}
	return c.answer(http.StatusCreated, map[string]any{
		"present": b.files.present(c.who.Tenant, hash), "url": b.link(c.r, c.who.Tenant, e.ID, hash),
	})
}

// lines are the log of a build, wherever it is now, as far as its lines matter enough.
func (b *Builder) lines(c *call, m *made) ([]line, error) {
	least := c.r.URL.Query().Get("level")
	if k := b.book(m.ID); k != nil {
		return ofLevel(k.all(), least)
	}
	all, err := c.s.log(c.r.Context(), m.ID)
	if err != nil {
		return nil, err
	}
	return ofLevel(all, least)
}

// maxPage is how many lines one answer has.
const maxPage = 100

func (b *Builder) status(c *call) error {
	offset, err := c.number("logsOffset", 0, 0, math.MaxInt32)
	if err != nil {
		return err
	}
	limit, err := c.number("limit", maxPage, 0, maxPage)
	if err != nil {
		return err
	}
	m, err := c.build()
	if err != nil {
		return err
	}

	all, err := b.lines(c, m)
	if err != nil {
		return err
	}
	from := min(int(offset), len(all))
	page := all[from:min(from+int(limit), len(all))]

	out := map[string]any{
		"templateID": m.Template, "buildID": m.ID, "status": m.Status, "logs": []string{}, "logEntries": orEmpty(page),
	}
	if m.Reason != nil {
		out["reason"] = m.Reason
	}
	return c.answer(http.StatusOK, out)
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// ofLevel leaves out what matters less than asked for.
func ofLevel(all []line, least string) ([]line, error) {
	if least == "" {
		return all, nil
	}
	n := slices.Index(levels, level(least))
	if n < 0 {
		return nil, fault.New(fault.Invalid, "unknown level %.20q: use debug, info, warn or error", least)
	}
	var out []line
	for _, l := range all {
		if slices.Index(levels, l.Level) >= n {
			out = append(out, l)
		}
	}
	return out, nil
}

func (b *Builder) logs(c *call) error {
	cursor, err := c.number("cursor", -1, 0, math.MaxInt64)
	if err != nil {
		return err
	}
	limit, err := c.number("limit", maxPage, 0, maxPage)
	if err != nil {
		return err
	}
	m, err := c.build()
	if err != nil {
		return err
	}
	all, err := b.lines(c, m)
	if err != nil {
		return err
	}

	backward := c.r.URL.Query().Get("direction") == "backward"
	out := make([]line, 0, limit)
	if backward {
		all = slices.Clone(all)
		slices.Reverse(all)
	}
	for _, l := range all {
		at := l.Time.UnixMilli()
		beyond := cursor >= 0 && (backward && at > cursor || !backward && at < cursor)
		if !beyond && len(out) < int(limit) {
			out = append(out, l)
		}
	}
	return c.answer(http.StatusOK, map[string]any{"logs": out})
}

package sandbox

import (
	"context"
	"fmt"
	"path"
	"regexp"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// snapshotFor bounds one snapshot: it copies as many files as a disk holds.
const snapshotFor = 10 * time.Minute

const maxDescription = 1 << 10

// templateName is the rule of template definitions.
var templateName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// userName is a name or a number, of a user and perhaps of a group, as images say it.
var userName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$`)

func checkUser(name string) error {
	if name != "" && !userName.MatchString(name) {
		return fault.New(fault.Invalid, "%.40q is not a name for a user", name)
	}
	return nil
}

func checkWorkdir(dir string) error {
	if dir != "" && (!path.IsAbs(dir) || path.Clean(dir) != dir) {
		return fault.New(fault.Invalid, "the working directory %.100q is not an absolute path", dir)
	}
	return checkName("working directory", dir, maxDescription)
}

// SnapshotSpec is what a template made of a sandbox's files is called and what it gives its sandboxes beyond files.
type SnapshotSpec struct {
	Name, Description string
	Env               map[string]string // above the template's own
	User, Workdir     string            // empty: the template's
	Sudo              bool              // its user may become root, whatever the template says
}

// Snapshot makes a template of a sandbox's files, which belongs to the caller's tenant. The sandbox goes on; a paused one
// stays paused.
func (m *Manager) Snapshot(ctx context.Context, p auth.Principal, id, name, description string) (*template.Template, error) {
	return m.SnapshotAs(ctx, p, id, SnapshotSpec{Name: name, Description: description})
}

// SnapshotAs is Snapshot of a template with defaults of its own.
func (m *Manager) SnapshotAs(ctx context.Context, p auth.Principal, id string, spec SnapshotSpec) (*template.Template, error) {
	name, description := spec.Name, spec.Description
	if !templateName.MatchString(name) {
		return nil, fault.New(fault.Invalid, "template name %.70q: use up to 63 lower-case letters, digits, '.', '_' and '-', a letter or digit first", name)
	}
	if err := checkName("description", description, maxDescription); err != nil {
		return nil, err
	}
	if err := firstError(checkEnv(spec.Env), checkUser(spec.User), checkWorkdir(spec.Workdir)); err != nil {
		return nil, err
	}
	e, leave, err := m.enterUsable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := m.canSnapshot(); err != nil {
		return nil, err
	}
	// What is defined and not built is fault.Unavailable, and taken as well.
	if _, err := m.templates.Resolve(ctx, p.Tenant, name); !fault.Is(err, fault.NotFound) {
		return nil, fault.New(fault.Conflict, "there is a template %s already; choose another name", name)
	}
	defer m.hold(e)()
	ctx, cancel := context.WithTimeout(ctx, snapshotFor)
	defer cancel()
	t, err := m.driver.Snapshot(ctx, SnapshotRequest{
		ID: id, Tenant: p.Tenant, Name: name, Description: description, Env: spec.Env, User: spec.User, Workdir: spec.Workdir, Sudo: spec.Sudo,
	})
	if err != nil {
		return nil, m.whyGone(ctx, e, fmt.Errorf("snapshot of sandbox %s: %w", id, err))
	}
	// Conflict: it has ended since, and its template is there.
	if err := m.save(ctx, e, LifecycleEvent{Type: LifecycleSnapshot, Message: name}); err != nil && !fault.Is(err, fault.Conflict) {
		return nil, fmt.Errorf("record snapshot of sandbox %s: %w", id, err)
	}
	return t, nil
}

// hold counts as use until it is let go; of a paused sandbox, whose idle clock stands still, it changes nothing.
func (m *Manager) hold(e *entry) (letGo func()) {
	if !e.touch() {
		return func() {}
	}
	return func() { m.release(e) }
}

func (m *Manager) canSnapshot() error {
	if caps := m.driver.Caps(); !caps.Snapshot {
		return fault.New(fault.Unsupported, "the %s driver cannot make templates of sandboxes", caps.Name)
	}
	return nil
}

// RemoveTemplate removes a template that a snapshot of the caller's tenant made. Sandboxes that run from it go on,
// and those that are being made from it are waited for.
func (m *Manager) RemoveTemplate(ctx context.Context, p auth.Principal, name string) error {
	leave, err := m.enter()
	if err != nil {
		return err
	}
	defer leave()
	done, err := m.uses.remove(ctx, p.Tenant, name)
	if err != nil {
		return err
	}
	defer done()
	t, err := m.templates.Resolve(ctx, p.Tenant, name)
	denied := fault.New(fault.Denied, "template %s was not made by a snapshot; only the server's operator can remove it", name)
	switch {
	case err == nil && t.Tenant == "":
		return denied
	case fault.Is(err, fault.Unavailable): // not built yet, or a snapshot of which a part is missing, which can be removed
		if err := m.driver.RemoveTemplate(ctx, p.Tenant, name); fault.Is(err, fault.NotFound) {
			return denied
		} else if err != nil {
			return fmt.Errorf("remove template %s: %w", name, err)
		}
		return nil
	case err != nil:
		return fmt.Errorf("resolve template: %w", err)
	}
	if err := m.driver.RemoveTemplate(ctx, p.Tenant, name); err != nil {
		return fmt.Errorf("remove template %s: %w", name, err)
	}
	return nil
}

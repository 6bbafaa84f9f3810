package build

import (
	"context"
	"fmt"
	"maps"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// What a tenant may have.
const (
	maxTemplates = 1000
	maxBuilds    = 50 // of a template; older ones are forgotten unless a tag names them
)

// request enters a new build of the template of that name, which it makes when there is none.
func (s *shelf) request(ctx context.Context, name string, tags []string, limits template.Limits) (*entry, *made, error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	e := s.find(ref{name: name})
	if e == nil {
		if len(s.all()) >= maxTemplates {
			return nil, nil, fault.New(fault.Exhausted, "there are %d templates, which is the limit; delete one first", maxTemplates)
		}
		e = &entry{ID: newTemplateID(), Alias: name, Created: now()}
	}
	next := *e
	next.Updated, next.Builds = now(), e.Builds+1
	m := &made{ID: newUUID(), Template: e.ID, Status: StatusWaiting, Tags: tags, Created: now(), Updated: now(), Limits: limits}
	if err := put(ctx, s, kindBuild, m.ID, m); err != nil {
		return nil, nil, err
	}
	if err := put(ctx, s, kindTemplate, next.ID, &next); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	s.templates[next.ID], s.aliases[next.Alias], s.builds[m.ID] = &next, next.ID, m
	s.mu.Unlock()
	return &next, m, s.forgetOld(ctx, &next)
}

// forgetOld drops the oldest builds that nothing can be started from; called with changing held.
func (s *shelf) forgetOld(ctx context.Context, e *entry) error {
	kept := 0
	for _, m := range s.buildsOf(e.ID) {
		running := m.Started && !m.Status.ended()
		if kept++; kept <= maxBuilds || running || m.Domain != "" {
			continue
		}
		if err := s.deleteBuild(ctx, m.ID); err != nil {
			return err
		}
	}
	return nil
}

func (s *shelf) deleteBuild(ctx context.Context, id string) error {
	for _, kind := range []string{kindLog, kindBuild} {
		if err := s.documents.DeleteDocument(ctx, s.tenant, kind, id); err != nil && !fault.Is(err, fault.NotFound) {
			return fmt.Errorf("forget build %s: %w", id, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.builds, id)
	return nil
}

// changeBuild replaces a build by what f makes of a copy. A build that is gone is fault.NotFound.
func (s *shelf) changeBuild(ctx context.Context, id string, f func(*made) error) (*made, error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	m := s.build(id)
	if m == nil {
		return nil, errNoBuild(id)
	}
	next := *m
	if err := f(&next); err != nil {
		return nil, err
	}
	next.Updated = now()
	if err := put(ctx, s, kindBuild, id, &next); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.builds[id] = &next
	return &next, nil
}

// complete makes a build ready and lets its tags name it, at once: who sees that it is ready can start from it. It tells which
// templates of the domain nobody names any more.
func (s *shelf) complete(ctx context.Context, id string, f func(*made)) (orphans []string, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	m := s.build(id)
	if m == nil {
		return nil, errNoBuild(id)
	}
	e := s.find(ref{name: m.Template})
	if e == nil {
		return nil, errNoTemplate(m.Template)
	}
	next, named := *m, *e
	f(&next)
	next.Status, next.Updated, named.Updated, named.Tags = StatusReady, now(), now(), map[string]tag{}
	maps.Copy(named.Tags, e.Tags)
	for _, name := range next.Tags {
		named.Tags[name] = tag{id, now()}
	}
	if err := put(ctx, s, kindBuild, id, &next); err != nil {
		return nil, err
	}
	if err := put(ctx, s, kindTemplate, named.ID, &named); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.builds[id], s.templates[named.ID] = &next, &named
	s.mu.Unlock()
	return s.orphans(ctx, &named)
}

// changeTags replaces the tags of a template and tells which templates of the domain nobody names any more.
func (s *shelf) changeTags(ctx context.Context, id string, f func(map[string]tag) error) (orphans []string, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	e := s.find(ref{name: id})
	if e == nil {
		return nil, errNoTemplate(id)
	}
	next := *e
	next.Tags, next.Updated = maps.Clone(e.Tags), now()
	if next.Tags == nil {
		next.Tags = map[string]tag{}
	}
	if err := f(next.Tags); err != nil {
		return nil, err
	}
	if err := put(ctx, s, kindTemplate, next.ID, &next); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.templates[next.ID] = &next
	s.mu.Unlock()
	return s.orphans(ctx, &next)
}

// orphans takes the files from builds that no tag names; called with changing held.
func (s *shelf) orphans(ctx context.Context, e *entry) (orphans []string, err error) {
	named := map[string]bool{}
	for _, t := range e.Tags {
		named[t.Build] = true
	}
	for _, m := range s.buildsOf(e.ID) {
		if named[m.ID] || m.Domain == "" {
			continue
		}
		orphans = append(orphans, m.Domain)
		next := *m
		next.Domain = ""
		if err := put(ctx, s, kindBuild, m.ID, &next); err != nil {
			return orphans, err
		}
		s.mu.Lock()
		s.builds[m.ID] = &next
		s.mu.Unlock()
	}
	return orphans, nil
}

// remove forgets a template with its builds and tells which templates of the domain it leaves.
func (s *shelf) remove(ctx context.Context, id string) (left []string, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	e := s.find(ref{name: id})
	if e == nil {
		return nil, errNoTemplate(id)
	}
	if err := s.documents.DeleteDocument(ctx, s.tenant, kindTemplate, e.ID); err != nil && !fault.Is(err, fault.NotFound) {
		return nil, fmt.Errorf("forget template %s: %w", e.ID, err)
	}
	s.mu.Lock()
	delete(s.templates, e.ID)
	delete(s.aliases, e.Alias)
	delete(s.uses, e.ID)
	s.mu.Unlock()
	for _, m := range s.buildsOf(e.ID) {
		if m.Domain != "" {
			left = append(left, m.Domain)
		}
		if err := s.deleteBuild(ctx, m.ID); err != nil {
			return left, err
		}
	}
	return left, nil
}

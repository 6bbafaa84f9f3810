package artifact

import (
	"container/list"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// sourceOf is what a file was when it was read; foundIn reads that back.
func sourceOf(f agentapi.Found) string {
	return fmt.Sprintf("%d %d %d %d", f.Inode, f.Size, f.Mod, f.Change)
}

func foundIn(a *Artifact) (f agentapi.Found, ok bool) {
	n, err := fmt.Sscanf(a.Source, "%d %d %d %d", &f.Inode, &f.Size, &f.Mod, &f.Change)
	f.Path = a.Path
	return f, err == nil && n == 4
}

// memory is what needs no second look, by session. A sandbox decides how many names there are and how long, so it holds marks
// instead of names, and all sessions together so many at most: the one that was used longest ago is forgotten first, which
// costs a second look.
type memory struct {
	mu       sync.Mutex
	sessions map[string]*list.Element // of *remembered
	order    list.List                // those used last in front
	held     int
}

type remembered struct {
	session string
	files   map[agentapi.Mark]agentapi.Mark // of a path: the file that was there
}

// maxRemembered is how many files, and sessions, a memory holds.
const maxRemembered = 500_000

func (r *remembered) cost() int { return 1 + len(r.files) }

// of is what is remembered of a session; nil: nothing, not even that there is nothing. The caller holds mu.
func (m *memory) of(session string) *remembered {
	at := m.sessions[session]
	if at == nil {
		return nil
	}
	m.order.MoveToFront(at)
	return at.Value.(*remembered)
}

// marks are what an agent need not tell again; ok: they are known.
func (m *memory) marks(session string) (all []byte, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.of(session)
	if r == nil {
		return nil, false
	}
	for mark := range maps.Values(r.files) {
		all = append(all, mark[:]...)
	}
	return all, true
}

// add remembers files of a session, and that it is known.
func (m *memory) add(session string, files []agentapi.Found) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.of(session)
	if r == nil {
		r = &remembered{session: session, files: map[agentapi.Mark]agentapi.Mark{}}
		if m.sessions == nil {
			m.sessions = map[string]*list.Element{}
		}
		m.sessions[session] = m.order.PushFront(r)
		m.held++
	}
	m.held -= r.cost()
	for _, f := range files {
		name := agentapi.MarkOf(f.Path)
		if _, there := r.files[name]; there || len(r.files) < agentapi.MaxCollected {
			r.files[name] = f.Mark()
		}
	}
	m.held += r.cost()
	for m.held > maxRemembered && m.order.Len() > 1 {
		m.drop(m.order.Back())
	}
}

func (m *memory) forget(session string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at := m.sessions[session]; at != nil {
		m.drop(at)
	}
}

func (m *memory) drop(at *list.Element) {
	r := m.order.Remove(at).(*remembered)
	m.held -= r.cost()
	delete(m.sessions, r.session)
}

// recall is what an agent need not tell. What nobody remembers, of a session of the server before this one or of one that was
// not used for long, is read back: files may lie in the box that are kept already.
func (k *Keeper) recall(ctx context.Context, from *agentapi.Client, tenant, session string, box Box) ([]byte, error) {
	if session == "" {
		return nil, nil
	}
	if marks, ok := k.seen.marks(session); ok {
		return marks, nil
	}
	known, err := k.keptOf(ctx, tenant, session)
	if err != nil {
		return nil, err
	}
	if !box.Keep {
		err := discard(ctx, from, box.Dir, known)
		if err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Invalid) {
			return nil, err
		}
		known = nil
	}
	k.seen.add(session, known)
	marks, _ := k.seen.marks(session)
	return marks, nil
}

// keptOf are the files that a session's newest artifacts were, as many as one collection has, each path once.
func (k *Keeper) keptOf(ctx context.Context, tenant, session string) ([]agentapi.Found, error) {
	known := map[string]agentapi.Found{}
	q := Query{Session: session, Limit: MaxLimit}
	for range agentapi.MaxCollected / MaxLimit {
		page, err := k.index.Artifacts(ctx, tenant, q)
		if err != nil {
			return nil, err
		}
		for i := range page.Artifacts {
			f, ok := foundIn(&page.Artifacts[i])
			if _, newer := known[f.Path]; ok && !newer {
				known[f.Path] = f
			}
		}
		if q.Cursor = page.Cursor; q.Cursor == "" {
			break
		}
	}
	return slices.Collect(maps.Values(known)), nil
}

// discardAtOnce is how many files one request names: it fits into a frame however their names are spelled.
const discardAtOnce = 1000

// discard removes files from a box that are still as they were found.
func discard(ctx context.Context, from *agentapi.Client, dir string, files []agentapi.Found) error {
	for some := range slices.Chunk(files, discardAtOnce) {
		if _, err := from.Discard(ctx, agentapi.DiscardParams{Path: dir, Files: some}); err != nil {
			return err
		}
	}
	return nil
}

// remember notes what stays in the box: what is kept where files stay, and what can never be kept as it is. What only lacks
// room is tried again.
func (k *Keeper) remember(session string, box Box, h *haul) {
	if session == "" {
		return
	}
	var stay []agentapi.Found
	for i, f := range h.found {
		if h.list[i].ID != "" && box.Keep || f.Refused != "" && f.Refused != agentapi.NoRoom {
			stay = append(stay, f)
		}
	}
	k.seen.add(session, stay)
}

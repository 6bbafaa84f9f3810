package maker

import (
	"slices"

	"golang.org/x/sys/unix"
)

// fileSystem is one in the host's disk that sandboxes write to: the disk of one, or a volume
// that several may have.
type fileSystem interface {
	// written is what it has there.
	written() diskUse
	// cutOff takes it away from those who use it: what they have written and is not on the host's
	// disk yet is dropped, and nothing reaches that disk any more.
	cutOff()
}

// diskUse is what a file system has on the host's disk, and what it says of itself. What is deleted
// keeps its place on the host's disk until it is given back, and what is written gets another or
// has none yet. So growth is the sum of both: what one of them loses does not hide what the other
// gains, as when space that was only promised (fallocate) is deleted without giving any back. What
// reaches the host's disk within the same time counts twice.
type diskUse struct{ allocated, used int64 }

func (now diskUse) since(before diskUse) int64 {
	return now.allocated - before.allocated + max(now.used-before.used, 0)
}

// writer is where a sandbox writes.
type writer struct {
	l       *live
	disk    *disk // nil: memory only
	volumes []*volume
}

func (m *Maker) writers() []writer {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]writer, 0, len(m.sandboxes))
	for _, l := range m.sandboxes {
		all = append(all, writer{l, l.shell.disk, slices.Clone(l.shell.volumes)})
	}
	return all
}

// spaceUse is how much the file systems of all sandboxes have at one moment.
type spaceUse struct {
	writers []writer
	bytes   map[fileSystem]diskUse
	totals  diskTotals
}

func (m *Maker) spaceUse() spaceUse {
	now := spaceUse{m.writers(), map[fileSystem]diskUse{}, diskTotals{tenants: map[string]int64{}}}
	for _, s := range now.writers {
		if k := s.disk; k != nil {
			has := allocated(k.image)
			now.bytes[k] = k.written()
			now.totals.promised += max(k.size-has, 0)
			now.totals.tenants[s.l.tenant] += has
		}
		for _, u := range s.volumes {
			if _, known := now.bytes[u]; !known {
				now.bytes[u] = u.written()
			}
		}
	}
	return now
}

// grown is how much a file system has grown since an earlier moment. A disk that is not known from
// then had nothing. A volume may be old: one that is not known has not grown yet.
func (now spaceUse) grown(p fileSystem, since map[fileSystem]diskUse) int64 {
	before, known := since[p]
	if _, isVolume := p.(*volume); isVolume && !known {
		return 0
	}
	return now.bytes[p].since(before)
}

// grownBy is how much the file systems of a sandbox have grown. What several sandboxes write to one
// volume counts for each of them.
func (now spaceUse) grownBy(s writer, since map[fileSystem]diskUse) (bytes int64) {
	if s.disk != nil {
		bytes = now.grown(s.disk, since)
	}
	for _, u := range s.volumes {
		bytes += max(now.grown(u, since), 0)
	}
	return bytes
}

// grownByTenant is how much the file systems of each tenant's sandboxes have grown. What several
// sandboxes write to one volume counts once.
func (now spaceUse) grownByTenant(since map[fileSystem]diskUse) map[string]int64 {
	bytes, counted := map[string]int64{}, map[fileSystem]bool{}
	add := func(tenant string, p fileSystem) {
		if !counted[p] {
			counted[p] = true
			bytes[tenant] += max(now.grown(p, since), 0)
		}
	}
	for _, s := range now.writers {
		if s.disk != nil {
			add(s.l.tenant, s.disk)
		}
		for _, u := range s.volumes {
			add(s.l.tenant, u)
		}
	}
	return bytes
}

func (k *disk) written() diskUse { return diskUse{allocated(k.image), k.bytes()} }

func (u *volume) written() (has diskUse) {
	var st unix.Stat_t
	if unix.Lstat(u.path, &st) == nil {
		has.allocated = st.Blocks * 512
	}
	if root := u.root.Load(); root != nil {
		if used, err := usedBytes(root); err == nil {
			has.used = used
		}
	}
	return has
}

func (k *disk) cutOff() { shutDown(k.root) }

// cutOff of a volume loses nothing that was synced: it has a journal, and its next user mounts it
// anew. No sandbox gets it until its present users have left.
func (u *volume) cutOff() {
	u.cut.Store(true)
	if root := u.root.Load(); root != nil {
		shutDown(root)
	}
}

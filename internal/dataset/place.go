package dataset

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// linkTime bounds how long a sandbox may take to make a link; without it the data is found all the same.
const linkTime = 10 * time.Second

// Mounts are what a session's sandbox gets, whatever its access to data is.
func (s *Store) Mounts(ctx context.Context, tenant, session string, access Access, hostPath string) ([]sandbox.Mount, error) {
	switch {
	case access == AccessLocal && hostPath == "":
		return nil, fault.New(fault.Invalid,
			"datasets with access local_ro need the path of a directory of the server's host, one that its operator allows (storage.host_paths)")
	case access == AccessNone && hostPath != "":
		return nil, fault.New(fault.Invalid, "datasets have the path %.100q and access none: use local_ro to see it, or leave the path out", hostPath)
	case hostPath != "" && (!path.IsAbs(hostPath) || path.Clean(hostPath) != hostPath):
		return nil, fault.New(fault.Invalid, "the path of datasets %.100q is not a plain absolute path of the server's host", hostPath)
	}
	var mounts []sandbox.Mount
	if access == AccessAPI {
		m, err := s.Mount(ctx, tenant, session)
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	if hostPath != "" {
		mounts = append(mounts, sandbox.Mount{Kind: sandbox.MountHost, Source: hostPath, Target: Local, ReadOnly: true})
	}
	return mounts, nil
}

// Mount makes the directory of a session, with all that is loaded, for its sandbox to see.
func (s *Store) Mount(ctx context.Context, tenant, session string) (sandbox.Mount, error) {
	s.place.Lock()
	defer s.place.Unlock()
	if err := s.blobs.MakeDir(session); err != nil {
		return sandbox.Mount{}, err
	}
	if err := s.mend(ctx, tenant, session); err != nil {
		return sandbox.Mount{}, err
	}
	return sandbox.Mount{Kind: sandbox.MountData, Source: session, Target: Mounted, ReadOnly: true}, nil
}

// mend makes a directory show what the rows say, and nothing else: a server that is killed, or a disk that loses its last
// moments, leaves the two apart. The caller holds place.
func (s *Store) mend(ctx context.Context, tenant, session string) error {
	all, err := s.index.Datasets(ctx, tenant, session)
	if err != nil {
		return err
	}
	named := map[string]bool{}
	for _, d := range all {
		if d.Status != Loaded {
			continue
		}
		if err := s.showAgain(ctx, d); err != nil {
			return err
		}
		named[d.File] = true
	}
	files, err := s.blobs.Shown(session)
	if err != nil {
		return err
	}
	for _, file := range files {
		if named[file] {
			continue
		}
		if err := s.blobs.Hide(session, file); err != nil {
			return err
		}
	}
	return nil
}

// showAgain shows content that is loaded. What is gone has to be sent again, and that is told.
func (s *Store) showAgain(ctx context.Context, d Dataset) error {
	err := s.blobs.Show(d.Session, d.File, d.Tenant, d.SHA256)
	if !fault.Is(err, fault.NotFound) {
		return err
	}
	s.log.Warn("a dataset's content is gone", "session", d.Session, "dataset", d.ID, "sha256", d.SHA256)
	d.Status, d.Path, d.Size, d.SHA256, d.Error = Failed, "", 0, "", "its content is gone from the server: send it again"
	return errors.Join(s.index.PutDataset(ctx, d), s.blobs.Hide(d.Session, d.File))
}

// Place makes the links in Dir to all that is loaded, and takes away those to what is not. It belongs after every start of a
// session's sandbox. What the user has there under the same name stays; then the dataset's path is below Mounted.
func (s *Store) Place(ctx context.Context, tenant, session string, agent *agentapi.Client) error {
	all, err := s.index.Datasets(ctx, tenant, session)
	if err != nil {
		return err
	}
	var files []string
	for _, d := range all {
		if d.Status != Loaded {
			continue
		}
		files = append(files, d.File)
		if _, err := s.link(ctx, d, agent); err != nil {
			return err
		}
	}
	s.unlinkOthers(ctx, session, agent, files)
	return context.Cause(ctx)
}

// link makes the link to one dataset, and remembers where it is then. Code finds it below Mounted in any case, so a link that
// is not made is no failure.
func (s *Store) link(ctx context.Context, d Dataset, agent *agentapi.Client) (Dataset, error) {
	at := Dir + "/" + d.File
	if err := agent.Symlink(ctx, agentapi.SymlinkParams{Path: at, Target: Mounted + "/" + d.File}); err != nil {
		s.log.Debug("a dataset has no link", "session", d.Session, "dataset", d.ID, "error", err)
		at = Mounted + "/" + d.File
	}
	if d.Path == at {
		return d, nil
	}
	d.Path = at
	return d, s.index.PlaceDataset(ctx, d)
}

// linkNow is link where there is a sandbox, also when the sender has left meanwhile.
func (s *Store) linkNow(ctx context.Context, d Dataset, find Finder) (Dataset, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), linkTime)
	defer cancel()
	agent, err := find(ctx)
	if err != nil {
		return d, nil // Place comes with the next sandbox
	}
	return s.link(ctx, d, agent)
}

// unlinkOthers removes links in Dir that lead to datasets which are not there: a volume outlives the sandbox they were made in.
// The directory is the user's: whatever is wrong with it, the session opens all the same, and a link that stays leads nowhere.
func (s *Store) unlinkOthers(ctx context.Context, session string, agent *agentapi.Client, files []string) {
	entries, err := agent.List(ctx, agentapi.ListParams{Path: Dir})
	var left int
	for _, e := range entries {
		file, ours := strings.CutPrefix(e.Target, Mounted+"/")
		if !ours || file != e.Name || slices.Contains(files, file) || left >= maxPerSession {
			continue
		}
		left++
		err = errors.Join(err, agent.Symlink(ctx, agentapi.SymlinkParams{Path: e.Path, Target: e.Target, Remove: true}))
	}
	if err != nil && !fault.Is(err, fault.NotFound) {
		s.log.Debug("links to datasets that are gone may be left", "session", session, "error", err)
	}
}

// Seen is what a run of a session can see now.
func (s *Store) Seen(ctx context.Context, tenant, session string) ([]artifact.Dataset, error) {
	all, err := s.index.Datasets(ctx, tenant, session)
	if err != nil {
		return nil, err
	}
	var seen []artifact.Dataset
	for _, d := range all {
		if d.Status == Loaded {
			seen = append(seen, artifact.Dataset{ID: d.ID, SHA256: d.SHA256})
		}
	}
	return seen, nil
}

// ListLocal are the files of the host's directory that a session sees, by id.
func ListLocal(ctx context.Context, find Finder) ([]Dataset, error) {
	agent, err := find(ctx)
	if err != nil {
		return nil, err
	}
	entries, err := agent.List(ctx, agentapi.ListParams{Path: Local})
	if err != nil {
		return nil, err
	}
	var all []Dataset
	for _, e := range entries {
		if e.Type == agentapi.EntryFile {
			all = append(all, Dataset{ID: idOf(e.Name), File: e.Name, Status: Loaded, Path: e.Path, Size: e.Size, Updated: e.ModTime})
		}
	}
	slices.SortFunc(all, func(a, b Dataset) int { return strings.Compare(a.ID, b.ID) })
	return all, nil
}

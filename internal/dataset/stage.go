package dataset

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// Finder is the agent of a session's sandbox at the time it is asked, or an error: there is none.
type Finder func(ctx context.Context) (*agentapi.Client, error)

// Upload is a dataset that a caller sends.
type Upload struct {
	ID   string
	File string // its name in Dir; empty: made of the id
	Size int64  // negative: not known before
	Body io.Reader
}

// Stage takes a dataset in and shows it to its session when all of it has arrived. A second one of the same id waits for the
// first. One that does not arrive is failed; what was loaded under that id before stays as it was.
//
// The link in Dir is made where the session has a sandbox, else when it gets one (Place).
func (s *Store) Stage(ctx context.Context, tenant, session string, up Upload, find Finder) (Dataset, error) {
	file, err := fileOf(up.ID, up.File)
	if err == nil {
		err = s.checkSize(up.Size)
	}
	if err != nil {
		s.rejected(err)
		return Dataset{}, err
	}
	in, err := s.begin(ctx, tenant, up.Size)
	if err != nil {
		s.rejected(err)
		return Dataset{}, err
	}
	defer in.end()
	done, err := s.turns.take(ctx, session+"/"+up.ID)
	if err != nil {
		return Dataset{}, err
	}
	defer done()
	d := Dataset{Tenant: tenant, Session: session, ID: up.ID, File: file, Status: Staging}
	if _, err := s.note(ctx, d); err != nil {
		s.rejected(err)
		return Dataset{}, err
	}
	d, err = s.take(ctx, d, up.Body, in)
	if err != nil {
		s.rejected(err)
		return Dataset{}, errors.Join(err, s.fail(ctx, session, up.ID, err))
	}
	return s.linkNow(ctx, d, find)
}

// checkSize refuses what is known to be too large before any of it is sent.
func (s *Store) checkSize(size int64) error {
	if s.cfg.MaxSize > 0 && size > s.cfg.MaxSize {
		return s.tooLarge()
	}
	return nil
}

func (s *Store) tooLarge() error {
	return rejection{"too_large", fault.New(fault.Invalid, "a dataset has at most %d bytes here (datasets.max_size)", s.cfg.MaxSize)}
}

// note writes down what is said of a dataset, unless it is loaded: then that stays, and is returned.
func (s *Store) note(ctx context.Context, d Dataset) (Dataset, error) {
	s.place.Lock()
	defer s.place.Unlock()
	old, err := s.before(ctx, d)
	if err != nil || old.Status == Loaded {
		return old, err
	}
	d.Updated = time.Now()
	return d, s.index.PutDataset(ctx, d)
}

// before is what is known of a dataset so far, if the session has room for it and for its file. The caller holds place.
func (s *Store) before(ctx context.Context, d Dataset) (old Dataset, err error) {
	all, err := s.index.Datasets(ctx, d.Tenant, d.Session)
	if err != nil {
		return old, err
	}
	for _, other := range all {
		if other.ID == d.ID {
			old = other
		} else if other.File == d.File {
			return old, fault.New(fault.Conflict, "the dataset %s of this session has the file name %s already: give another file", other.ID, d.File)
		}
	}
	if old.ID == "" && len(all) >= maxPerSession {
		return old, fault.New(fault.Exhausted, "a session has at most %d datasets: remove some", maxPerSession)
	}
	return old, nil
}

// take receives content and puts it into place.
func (s *Store) take(ctx context.Context, d Dataset, body io.Reader, in *arrival) (Dataset, error) {
	draft, err := s.blobs.Draft(d.Tenant)
	if err != nil {
		return d, err
	}
	defer draft.Drop()
	if err := s.receive(ctx, io.MultiWriter(in, draft), body); err != nil {
		return d, err
	}
	if d.SHA256, d.Size, err = draft.Settle(); err != nil {
		return d, err
	}
	// All of it is here: whether its sender waits for the answer makes no difference any more.
	return s.keep(context.WithoutCancel(ctx), d, draft)
}

// keep puts content that has arrived into place, and shows it.
func (s *Store) keep(ctx context.Context, d Dataset, draft Draft) (Dataset, error) {
	s.place.Lock()
	defer s.place.Unlock()
	_, err := s.blobs.Size(d.Tenant, d.SHA256)
	there := err == nil
	if !there {
		if err := s.checkRoom(ctx, d.Tenant, d.Size); err != nil {
			return d, err
		}
	}
	if err := draft.Keep(); err != nil {
		return d, err
	}
	d, err = s.show(ctx, d)
	if err != nil {
		return d, errors.Join(err, s.blobs.Release(d.Tenant, d.SHA256))
	}
	s.hears.DatasetStaged(d.Size, there)
	return d, nil
}

// receive copies what arrives, and no more of it than is allowed.
func (s *Store) receive(ctx context.Context, to io.Writer, body io.Reader) error {
	if s.cfg.MaxSize > 0 {
		body = io.LimitReader(body, s.cfg.MaxSize+1)
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{to}, arriving{body}, make([]byte, 256<<10))
	switch {
	case err != nil && ctx.Err() != nil:
		return fault.Wrap(fault.Invalid, context.Cause(ctx), "the dataset did not arrive: its sender left after %d bytes", n)
	case err != nil:
		return err
	case s.cfg.MaxSize > 0 && n > s.cfg.MaxSize:
		return s.tooLarge()
	}
	return nil
}

// arriving tells a sender that broke off from a disk that did not take what came.
type arriving struct{ io.Reader }

func (a arriving) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && fault.KindOf(err) == fault.Internal {
		err = fault.Wrap(fault.Invalid, err, "the dataset did not arrive: its sender broke off")
	}
	return n, err
}

// used is what a tenant's contents count, each with its inode.
func (s *Store) used(ctx context.Context, tenant string) (int64, error) {
	bytes, files, err := s.index.DatasetsHeld(ctx, tenant)
	more, open := s.blobs.Lingering(tenant)
	return diskspace.Charge(bytes+more, files+open), err
}

func (s *Store) checkRoom(ctx context.Context, tenant string, size int64) error {
	if s.cfg.MaxTenantSize <= 0 {
		return nil
	}
	used, err := s.used(ctx, tenant)
	if err != nil {
		return err
	}
	if size = diskspace.Charge(size, 1); used+size > s.cfg.MaxTenantSize {
		return rejection{"tenant_quota", fault.New(fault.Exhausted,
			"your datasets count %d bytes, 4 KiB of them for each, and with %d more they would have more than the %d that are allowed (datasets.max_tenant_size): remove some, or sessions that have them",
			used, size, s.cfg.MaxTenantSize)}
	}
	return nil
}

// show makes content visible to its session, first the file and then the row: a row that says loaded has its file. The caller
// holds place.
func (s *Store) show(ctx context.Context, d Dataset) (Dataset, error) {
	old, err := s.before(ctx, d)
	if err != nil {
		return d, err
	}
	if err := s.blobs.Show(d.Session, d.File, d.Tenant, d.SHA256); err != nil {
		return d, err
	}
	d.Status, d.Error, d.Path, d.Updated = Loaded, "", Mounted+"/"+d.File, time.Now()
	if err := s.index.PutDataset(ctx, d); err != nil {
		return d, errors.Join(err, s.mend(ctx, d.Tenant, d.Session))
	}
	if old.Status != Loaded {
		return d, nil
	}
	if old.File != d.File {
		if err := s.blobs.Hide(d.Session, old.File); err != nil {
			return d, err
		}
	}
	return d, s.blobs.Release(d.Tenant, old.SHA256)
}

// fail writes down that what was staged did not arrive. The caller may be gone: it is written all the same.
func (s *Store) fail(ctx context.Context, session, id string, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return s.index.FailDatasets(ctx, session, id, bounded(fault.Message(why)), time.Now())
}

// Mark is what a caller says of a dataset without sending it.
type Mark struct {
	ID     string
	File   string
	Status Status // pending or failed, or loaded with SHA256
	SHA256 string // of content that the tenant sent before
	Error  string
}

// Mark writes down what a caller says. What is loaded stays loaded: whoever says pending hears so, and need not fetch it.
func (s *Store) Mark(ctx context.Context, tenant, session string, m Mark, find Finder) (Dataset, error) {
	file, err := fileOf(m.ID, m.File)
	if err != nil {
		return Dataset{}, err
	}
	done, err := s.turns.take(ctx, session+"/"+m.ID)
	if err != nil {
		return Dataset{}, err
	}
	defer done()
	d := Dataset{Tenant: tenant, Session: session, ID: m.ID, File: file, Status: m.Status, Error: bounded(m.Error)}
	switch m.Status {
	case Pending, Failed:
		return s.note(ctx, d)
	case Loaded:
		if !sha256Text.MatchString(m.SHA256) {
			return Dataset{}, fault.New(fault.Invalid, "loaded needs the sha256 of content that is here, as 64 hexadecimal digits: send the dataset otherwise")
		}
		d.SHA256 = m.SHA256
		if d, err = s.again(ctx, d); err != nil {
			return Dataset{}, err
		}
		return s.linkNow(ctx, d, find)
	default:
		return Dataset{}, fault.New(fault.Invalid, "status %.40q: use pending, failed or loaded", m.Status)
	}
}

// again shows content that is here.
func (s *Store) again(ctx context.Context, d Dataset) (_ Dataset, err error) {
	s.place.Lock()
	defer s.place.Unlock()
	if d.Size, err = s.blobs.Size(d.Tenant, d.SHA256); err != nil {
		return d, err
	}
	d, err = s.show(ctx, d)
	if err == nil {
		s.hears.DatasetStaged(d.Size, true)
	}
	return d, err
}

// Remove takes a dataset out of a session.
func (s *Store) Remove(ctx context.Context, tenant, session, id string, find Finder) error {
	if _, err := fileOf(id, ""); err != nil {
		return err
	}
	done, err := s.turns.take(ctx, session+"/"+id)
	if err != nil {
		return err
	}
	defer done()
	d, err := s.hide(ctx, tenant, session, id)
	if err != nil || d.Status != Loaded {
		return err
	}
	if agent, err := find(ctx); err == nil {
		// A link that stays leads nowhere, and the next Place removes it.
		_ = agent.Symlink(ctx, agentapi.SymlinkParams{Path: Dir + "/" + d.File, Target: Mounted + "/" + d.File, Remove: true})
	}
	return nil
}

// hide makes a session's content invisible, first the row and then the file: a row that says loaded has its file.
func (s *Store) hide(ctx context.Context, tenant, session, id string) (Dataset, error) {
	s.place.Lock()
	defer s.place.Unlock()
	d, err := s.index.Dataset(ctx, tenant, session, id)
	if err != nil {
		return d, err
	}
	if err := s.index.DeleteDataset(ctx, tenant, session, id); err != nil || d.Status != Loaded {
		return d, err
	}
	if err := s.blobs.Hide(session, d.File); err != nil {
		return d, err
	}
	return d, s.blobs.Release(tenant, d.SHA256)
}

// List are the datasets of a session, by id.
func (s *Store) List(ctx context.Context, tenant, session string) ([]Dataset, error) {
	return s.index.Datasets(ctx, tenant, session)
}

// rejection is an upload that was refused, with the word that counts it.
type rejection struct {
	reason string
	error
}

func (r rejection) Unwrap() error { return r.error }

func (s *Store) rejected(err error) {
	var r rejection
	switch {
	case errors.As(err, &r):
		s.hears.DatasetRejected(r.reason)
	case fault.Is(err, fault.Invalid), fault.Is(err, fault.Conflict):
		s.hears.DatasetRejected("invalid")
	default:
		s.hears.DatasetRejected("internal")
	}
}

// bounded is what is kept of an explanation.
func bounded(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= maxError {
		return text
	}
	cut := maxError
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + "…"
}

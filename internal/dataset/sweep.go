package dataset

import (
	"context"
	"errors"
	"time"

	"github.com/covehq/cove/internal/artifact"
)

// Open clears away what a server that was killed has left, and begins to sweep.
func (s *Store) Open(ctx context.Context) error {
	if err := s.index.FailDatasets(ctx, "", "", "the server ended while it arrived: send it again", time.Now()); err != nil {
		return err
	}
	if err := s.sweep(ctx); err != nil {
		return err
	}
	// Owned by the Store and ended by Close.
	work, quit := context.WithCancel(context.Background())
	s.quit = quit
	s.work.Go(func() { s.sweeps(work) })
	return nil
}

// Close ends the sweeping.
func (s *Store) Close() error {
	s.quit()
	s.work.Wait()
	return nil
}

func (s *Store) sweeps(ctx context.Context) {
	every := time.NewTicker(s.cfg.SweepEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
		if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("datasets are not swept", "error", err)
		}
	}
}

// sweep forgets sessions that are gone, mends the directories of the others and then removes content that nobody sees.
func (s *Store) sweep(ctx context.Context) error {
	dirs, err := s.blobs.Dirs()
	if err != nil {
		return err
	}
	var all []error
	for _, dir := range dirs {
		all = append(all, s.sweepDir(ctx, dir))
	}
	return errors.Join(append(all, s.sweepContent(ctx))...)
}

// sweepContent releases all content. Others come in between: there may be much.
func (s *Store) sweepContent(ctx context.Context) error {
	for r, err := range s.blobs.All() {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = s.release(r)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) release(r artifact.Ref) error {
	s.place.Lock()
	defer s.place.Unlock()
	return s.blobs.Release(r.Tenant, r.SHA256)
}

func (s *Store) sweepDir(ctx context.Context, session string) error {
	s.place.Lock()
	defer s.place.Unlock()
	alive, err := true, error(nil)
	if s.cfg.Alive != nil {
		alive, err = s.cfg.Alive(ctx, session)
	}
	switch {
	case err != nil:
		return err
	case !alive:
		return errors.Join(s.index.ForgetDatasets(ctx, session), s.blobs.RemoveDir(session))
	}
	return s.mend(ctx, "", session)
}

// Forget drops all that a session had; it is removed.
func (s *Store) Forget(ctx context.Context, tenant, session string) error {
	s.place.Lock()
	defer s.place.Unlock()
	all, err := s.index.Datasets(ctx, tenant, session)
	if err != nil {
		return err
	}
	if err := s.index.ForgetDatasets(ctx, session); err != nil {
		return err
	}
	errs := []error{s.blobs.RemoveDir(session)}
	for _, d := range all {
		if d.SHA256 != "" {
			errs = append(errs, s.blobs.Release(tenant, d.SHA256))
		}
	}
	return errors.Join(errs...)
}

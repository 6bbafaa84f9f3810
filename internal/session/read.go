package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// LogQuery chooses among the lines of a log, oldest first.
type LogQuery struct {
	After  int64 // only lines with a higher seq
	Last   int   // only so many of the newest; zero: all
	Follow bool  // wait for those to come
	// Following is called before the first line once the query has a place among the tenant's followers; nil: nothing is.
	Following func()
}

// Log yields the lines of a session's log as JSON. With Follow it goes on until ctx, the session or the Manager ends.
func (m *Manager) Log(ctx context.Context, p auth.Principal, key string, q LogQuery) iter.Seq2[json.RawMessage, error] {
	return func(yield func(json.RawMessage, error) bool) {
		e, leave, err := m.enter(p.Tenant, key)
		if err != nil {
			yield(nil, err)
			return
		}
		defer leave()
		if q.Follow {
			done, err := m.countFollower(p.Tenant)
			if err != nil {
				yield(nil, err)
				return
			}
			defer done()
			if q.Following != nil {
				q.Following()
			}
		}
		var offset int64
		of := ""
		for first := true; ; first = false {
			dir, more, err := m.look(ctx, e)
			if err != nil {
				if first {
					yield(nil, err)
				}
				return // it was removed, or nobody waits any more
			}
			if !first && dir != of {
				return // it was removed, and the key is another session's
			}
			of = dir
			if first && q.Last > 0 {
				offset, err = skip(dir, q)
			}
			if err == nil {
				err = follow(dir, &offset, q.After, yield)
			}
			if errors.Is(err, errLeft) {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !q.Follow {
				return
			}
			select {
			case <-more:
			case <-ctx.Done():
				return
			case <-m.life.Done():
				return
			}
		}
	}
}

// countFollower counts a stream of a tenant until done. One over the tenant's share is fault.Exhausted.
func (m *Manager) countFollower(tenant string) (done func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.follows[tenant]; n >= m.cfg.MaxFollowers {
		return nil, fault.New(fault.Exhausted, "%d streams of session logs are open; the limit of a tenant is %d: end one, or share one", n, m.cfg.MaxFollowers)
	}
	m.follows[tenant]++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.follows[tenant]--; m.follows[tenant] == 0 {
			delete(m.follows, tenant)
		}
	}, nil
}

var errLeft = errors.New("the caller has heard enough")

// look finds where a log lies and what tells of its next line.
func (m *Manager) look(ctx context.Context, e *entry) (dir string, more <-chan struct{}, err error) {
	if err := m.hold(ctx, e); err != nil {
		return "", nil, err
	}
	defer e.life.free()
	if e.s == nil || e.s.State == StateStarting {
		return "", nil, noSession(e.key)
	}
	return e.log.dir, e.log.more, nil
}

// follow yields what comes behind an offset, which it moves on.
func follow(dir string, offset *int64, after int64, yield func(json.RawMessage, error) bool) (err error) {
	failed := readLines(dir, *offset, func(line []byte, next int64) bool {
		*offset = next
		if seqOf(line) <= after || !json.Valid(line) {
			return true
		}
		if !yield(line, nil) {
			err = errLeft
		}
		return err == nil
	})
	return errors.Join(failed, err)
}

// skip is where the newest lines of a log begin, which is looked for from its end.
func skip(dir string, q LogQuery) (offset int64, err error) {
	f, err := os.Open(filepath.Join(dir, logFile))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the log of a session: %w", err)
	}
	defer f.Close()
	at, err := f.Seek(0, io.SeekEnd)
	block := make([]byte, 64<<10)
	for lines := -1; err == nil && at > 0; { // the end of the last line begins none
		n := min(at, int64(len(block)))
		if _, err = f.ReadAt(block[:n], at-n); err != nil {
			break
		}
		for i := n - 1; i >= 0; i-- {
			if block[i] != '\n' {
				continue
			}
			if lines++; lines == q.Last {
				return at - n + i + 1, nil
			}
		}
		at -= n
	}
	if err != nil {
		return 0, fmt.Errorf("read the log of a session: %w", err)
	}
	return 0, nil
}

func seqOf(line []byte) int64 {
	var head lineHead
	if json.Unmarshal(line, &head) != nil {
		return 0
	}
	return head.Seq
}

// State is what a session's kernel held after its last cell.
func (m *Manager) State(ctx context.Context, p auth.Principal, key string) (PythonState, error) {
	e, done, err := m.find(ctx, p, key)
	if err != nil {
		return PythonState{}, err
	}
	defer done()
	if e.state != nil {
		return *e.state, nil
	}
	s := PythonState{Time: e.s.Created, Variables: map[string]agentapi.Variable{}, Modules: []string{}}
	text, err := os.ReadFile(filepath.Join(m.folder(*e.s), stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return PythonState{}, fault.Wrap(fault.Internal, err, "what the kernel of session %s held cannot be read", key)
	}
	return s, nil
}

package envd

import (
	"context"
	"crypto/rand"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxPollers = 64               // of one sandbox
	maxQueued  = 10_000           // events of one watcher; then the oldest are dropped
	maxHeld    = 1 << 20          // bytes that they take: what changes in a sandbox, and how often, is up to the code in it
	maxAll     = 256 << 20        // bytes of all watchers of all sandboxes; then there are no new ones, and
	minHeld    = 64 << 10         // each keeps so many: one tenant's do not silence those of the others
	maxUnasked = 10 * time.Minute // after which a watcher that nobody asks ends
)

// pollers are the watchers that clients ask from time to time. They belong to their sandbox: they end with it, when they
// are removed or when the server ends.
type pollers struct {
	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	held atomic.Int64 // bytes of all

	mu     sync.Mutex
	closed bool
	all    map[string]map[string]*poller // by sandbox and id
}

func newPollers() *pollers {
	// They outlive the requests that make them; close ends them.
	life, end := context.WithCancel(context.Background())
	return &pollers{life: life, end: end, all: map[string]map[string]*poller{}}
}

func (l *pollers) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.end()
	l.wg.Wait()
}

// add begins a watch and keeps what it tells.
func (l *pollers) add(sandbox string, watch func(context.Context) (*watching, error)) (*poller, error) {
	life, cancel := context.WithCancel(l.life)
	p := &poller{id: "w" + strings.ToLower(rand.Text()), cancel: cancel, done: make(chan struct{}), total: &l.held, news: make(chan struct{})}
	if err := l.keep(sandbox, p); err != nil {
		cancel()
		return nil, err
	}
	w, err := watch(life)
	if err != nil {
		cancel()
		l.forget(sandbox, p)
		l.wg.Done()
		return nil, err
	}
	p.watching = w
	unasked := time.AfterFunc(maxUnasked, cancel)
	p.touch = func() { unasked.Reset(maxUnasked) }
	go func() { // owned by wg
		defer l.wg.Done()
		defer close(p.done)
		defer l.forget(sandbox, p)
		defer p.end(unasked)
		defer cancel()
		p.collect()
	}()
	return p, nil
}

// keep makes room for a watcher and counts it as living.
func (l *pollers) keep(sandbox string, p *poller) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return fault.New(fault.Unavailable, "the server is shutting down")
	}
	if len(l.all[sandbox]) >= maxPollers {
		return fault.New(fault.Exhausted, "the sandbox has %d watchers already; remove some", maxPollers)
	}
	if l.held.Load() >= maxAll {
		return fault.New(fault.Exhausted, "the server holds too many changes that nobody has asked for; ask for events or remove watchers, then try again")
	}
	if l.all[sandbox] == nil {
		l.all[sandbox] = map[string]*poller{}
	}
	l.all[sandbox][p.id] = p
	l.wg.Add(1)
	return nil
}

func (l *pollers) forget(sandbox string, p *poller) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all[sandbox], p.id)
	if len(l.all[sandbox]) == 0 {
		delete(l.all, sandbox)
	}
}

func (l *pollers) find(sandbox, id string) (*poller, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p, ok := l.all[sandbox][id]; ok {
		return p, nil
	}
	return nil, fault.New(fault.NotFound, "watcher with id %.64s not found", id)
}

// poller is one watcher with what nobody has asked for yet.
type poller struct {
	*watching
	id     string
	cancel context.CancelFunc
	done   chan struct{}
	total  *atomic.Int64 // bytes of all watchers

	mu     sync.Mutex
	touch  func() // puts off the end of a watcher that nobody asks; nil: it has ended
	queue  []*envdpb.FilesystemEvent
	held   int           // bytes of queue
	lost   int           // events that were dropped since somebody asked
	asked  int           // the last question whether everything was told
	synced int           // the last one that was answered
	news   chan struct{} // closed and replaced when synced changes
}

func (p *poller) collect() {
	for e, err := range p.stream.Events() {
		if err != nil {
			return
		}
		switch e.Type {
		case agentapi.EventFile:
			p.push(p.event(e.File))
		case agentapi.EventSynced:
			p.mu.Lock()
			p.synced = max(p.synced, e.Count)
			close(p.news)
			p.news = make(chan struct{})
			p.mu.Unlock()
		}
	}
}

func (p *poller) push(e *envdpb.FilesystemEvent) {
	e.Name = strings.Clone(e.Name) // a part of the whole path, which would be held with it
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, e)
	p.hold(weight(e))
	room := maxHeld
	if p.total.Load() > maxAll {
		room = minHeld
	}
	for len(p.queue) > maxQueued || p.held > room {
		p.hold(-weight(p.queue[0]))
		p.queue[0] = nil // the array stays
		p.queue = p.queue[1:]
		p.lost++
	}
}

// hold counts bytes of the queue; the caller has the lock.
func (p *poller) hold(bytes int) {
	p.held += bytes
	p.total.Add(int64(bytes))
}

// weight is about how much memory an event takes.
func weight(e *envdpb.FilesystemEvent) int {
	const event, entry, pair = 96, 512, 128
	n := event + len(e.GetName())
	if e.GetEntry() == nil {
		return n
	}
	i := e.GetEntry()
	n += entry + len(i.GetName()) + len(i.GetPath()) + len(i.GetOwner()) + len(i.GetGroup()) + len(i.GetSymlinkTarget())
	for key, value := range i.GetMetadata() {
		n += pair + len(key) + len(value)
	}
	return n
}

// empty returns what is queued and how many events were dropped before; the caller has the lock.
func (p *poller) empty() (events []*envdpb.FilesystemEvent, lost int) {
	events, lost = p.queue, p.lost
	p.queue, p.lost = nil, 0
	p.hold(-p.held)
	return events, lost
}

// end lets go of what nobody will ask for.
func (p *poller) end(unasked *time.Timer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.touch = nil
	unasked.Stop()
	p.empty()
}

// ask numbers a question, and the watcher lives on.
func (p *poller) ask() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.touch == nil {
		return 0, p.gone()
	}
	p.touch()
	p.asked++
	return p.asked, nil
}

func (p *poller) gone() error {
	return fault.New(fault.NotFound, "watcher with id %s not found: its directory or its sandbox is gone", p.id)
}

// take returns everything that changed before it was called and that nobody has taken.
func (p *poller) take(ctx context.Context) ([]*envdpb.FilesystemEvent, error) {
	ask, err := p.ask()
	if err != nil {
		return nil, err
	}
	if err := p.stream.Control(agentapi.Control{Sync: ask}); err != nil {
		return nil, err
	}
	for {
		p.mu.Lock()
		if p.synced >= ask {
			events, lost := p.empty()
			p.mu.Unlock()
			tellLost(ctx, lost)
			return events, nil
		}
		news := p.news
		p.mu.Unlock()
		select {
		case <-news:
		case <-p.done:
			return nil, p.gone()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// tellLost says in the sandbox's log that events were dropped: the answer has no place for it.
func tellLost(ctx context.Context, lost int) {
	if lost > 0 {
		target.From(ctx).Log(target.Line{
			At: time.Now(), Level: "warn", Logger: "filesystem",
			Message: strconv.Itoa(lost) + " changes were dropped because nobody asked for them in time; look at the directory itself",
		})
	}
}

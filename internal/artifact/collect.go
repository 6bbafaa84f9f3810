package artifact

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// refusal is why a file is not kept: a word for those who count, a sentence for its owner.
type refusal struct{ reason, message string }

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// kind is that of the fault for whoever asked for this one file.
func (r *refusal) kind() fault.Kind {
	if r.reason == "changed" { // trying again may help
		return fault.Conflict
	}
	return fault.Exhausted
}

// Collect takes what is new or changed in a box out of a sandbox: what is kept and, with Error, what is not, in order of
// path. When it fails nothing is lost: what has no row is still in the box.
func (k *Keeper) Collect(ctx context.Context, from *agentapi.Client, tenant string, o Origin, box Box) ([]Artifact, error) {
	seen, err := k.recall(ctx, from, tenant, o.Session, box)
	if err != nil {
		return nil, err
	}
	h, err := k.begin(ctx, tenant, o)
	if err != nil {
		return nil, err
	}
	defer h.end(ctx)
	c, err := from.Collect(ctx, agentapi.CollectParams{
		Path: box.Dir, MaxBytes: k.cfg.MaxFileSize, MaxTotal: h.book.room(), MaxFiles: box.MaxFiles, Seen: seen,
	})
	if fault.Is(err, fault.NotFound) {
		return nil, nil
	}
	if fault.Is(err, fault.Invalid) {
		return []Artifact{k.reject(Artifact{Tenant: tenant, Path: ".", Name: path.Base(box.Dir), Origin: h.origin}, refuse("unreadable", "%s", fault.Message(err)))}, nil
	}
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := h.all(c); err != nil {
		return nil, err
	}
	if err := h.commit(ctx); err != nil {
		return nil, err
	}
	k.remember(o.Session, box, h)
	if !box.Keep {
		if err := h.discard(ctx, from, box.Dir); err != nil {
			// They are kept all the same. The next collection begins by removing what is.
			k.cfg.Log.Warn("files that are kept were not removed from the sandbox", "sandbox", o.Sandbox, "error", err)
			k.Forget(o.Session)
		}
	}
	return h.list, nil
}

// Keep keeps one file from anywhere in a sandbox, as its user can read it, and leaves it there.
func (k *Keeper) Keep(ctx context.Context, from *agentapi.Client, tenant string, o Origin, p string) (Artifact, error) {
	entry, content, err := from.Read(ctx, agentapi.ReadParams{Path: p})
	if err != nil {
		return Artifact{}, err
	}
	defer content.Close()
	h, err := k.begin(ctx, tenant, o)
	if err != nil {
		return Artifact{}, err
	}
	defer h.end(ctx)
	a := Artifact{Tenant: tenant, Name: path.Base(entry.Path), Path: clip(entry.Path), Size: entry.Size, Origin: h.origin}
	why, err := h.one(&a, content)
	if err != nil {
		return Artifact{}, err
	}
	if why != nil {
		return Artifact{}, fault.New(why.kind(), "%s: %s", a.Path, a.Error)
	}
	h.list = append(h.list, a)
	if err := h.commit(ctx); err != nil {
		return Artifact{}, err
	}
	return h.list[0], nil
}

func clip(p string) string {
	if len(p) > agentapi.MaxCollectedPath {
		p = p[:agentapi.MaxCollectedPath]
	}
	return strings.ToValidUTF8(p, "�")
}

// haul is one collection under way.
type haul struct {
	k         *Keeper
	book      *book
	tenant    string
	origin    Origin // without datasets
	datasets  []Dataset
	list      []Artifact
	found     []agentapi.Found // of list, where it came from a box
	refs      []Ref            // claimed
	committed bool             // what list says is kept has rows
	placing   placing
}

// placing puts blobs under their names while the next are read: most of what a small file takes is to make one.
type placing struct {
	work  sync.WaitGroup
	room  chan struct{} // bounds how many are under way, and with it what they hold in memory
	mu    sync.Mutex
	fresh []bool // of the haul's refs: the blob was not there before
	err   error
}

const maxPlacing = 4

// put takes over a draft, or says why another was not placed.
func (p *placing) put(d Draft, placed func()) error {
	if p.room == nil {
		p.room = make(chan struct{}, maxPlacing)
	}
	p.room <- struct{}{}
	p.mu.Lock()
	i, err := len(p.fresh), p.err
	p.fresh = append(p.fresh, false)
	p.mu.Unlock()
	if err != nil {
		<-p.room
		d.Drop()
		return err
	}
	p.work.Go(func() {
		defer func() { <-p.room }()
		existed, err := d.Place()
		d.Drop()
		p.mu.Lock()
		if p.fresh[i] = err == nil && !existed; err != nil {
			p.err = err
		}
		p.mu.Unlock()
		if err == nil {
			placed()
		}
	})
	return nil
}

// wait returns when all are placed, or why one was not.
func (p *placing) wait() error {
	p.work.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

func (k *Keeper) begin(ctx context.Context, tenant string, o Origin) (*haul, error) {
	b, err := k.ledger.open(ctx, k.index, &k.cfg, tenant, o.Session)
	if err != nil {
		return nil, err
	}
	datasets := o.Datasets
	o.Datasets = nil
	return &haul{k: k, book: b, tenant: tenant, origin: o, datasets: datasets}, nil
}

func (h *haul) end(ctx context.Context) {
	_ = h.placing.wait() // whoever stored them has asked
	h.k.claims.let(h.refs)
	if !h.committed {
		h.undo(ctx)
	}
	h.book.close()
}

const undoFor = 30 * time.Second // for as many files as one collection has

// undo removes what was placed for nothing, and then gives its room back: otherwise one who has every collection fail has more
// than any quota allows until the store is swept. Only what cannot be removed now is left to that.
func (h *haul) undo(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoFor)
	defer cancel()
	// Also what was there before: it may be what another has placed, who failed first and left it to us.
	for _, ref := range h.refs {
		if _, err := h.k.reap(ctx, ref); err != nil {
			h.k.cfg.Log.Warn("what a collection that failed has placed is not removed yet", "tenant", h.tenant, "error", err)
			break // the sweeper finds it
		}
	}
	for _, a := range h.list {
		if a.ID != "" {
			h.book.give(a.Size)
		}
	}
}

// all stores every file of a collection.
func (h *haul) all(c *agentapi.Collection) error {
	for {
		f, content, err := c.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if len(h.list) >= agentapi.MaxCollected {
			return fault.New(fault.Internal, "the agent tells more files than it may")
		}
		a := Artifact{Tenant: h.tenant, Name: path.Base(f.Path), Path: clip(f.Path), Size: f.Size, Origin: h.origin, Source: sourceOf(f)}
		switch {
		case !local(f.Path):
			return fault.New(fault.Internal, "the agent tells a file that is not in the box")
		case f.Refused == agentapi.TooLarge:
			a = h.k.reject(a, refuse("too_large", "it has %s, and a file of more than %s is not kept: it is still in the sandbox", human(f.Size), human(h.k.cfg.MaxFileSize)))
		case f.Refused == agentapi.NoRoom:
			a = h.k.reject(a, h.noRoom(f.Size))
		case f.Refused != "":
			a = h.k.reject(a, refuse("unreadable", "%.300s", f.Refused))
		default:
			if _, err := h.one(&a, content); err != nil {
				return err
			}
		}
		h.list, h.found = append(h.list, a), append(h.found, f)
	}
	if c.More() {
		a := Artifact{Tenant: h.tenant, Name: ".", Path: ".", Origin: h.origin}
		h.list = append(h.list, h.k.reject(a, refuse("too_many", "there are more files than are kept after one run: the rest is still in the sandbox, for the next")))
		h.found = append(h.found, agentapi.Found{Path: "."})
	}
	return nil
}

// noRoom is why a file was not even sent.
func (h *haul) noRoom(size int64) *refusal {
	if why := h.book.take(size); why != nil {
		return why
	}
	h.book.give(size) // it came free meanwhile
	return refuse("session_quota", "there was no room for it beside the others: it is still in the sandbox, and is tried again after the next run")
}

// local says whether a path stays below where it begins: an agent is the sandbox's, and may have been taken over.
func local(p string) bool {
	return p != "" && len(p) <= agentapi.MaxCollectedPath && utf8.ValidString(p) && path.Clean("/"+p) == "/"+p && !strings.Contains(p, "\x00")
}

func (k *Keeper) reject(a Artifact, why *refusal) Artifact {
	k.cfg.Observer.ArtifactRejected(why.reason)
	a.Error = why.message
	return a
}

// copies lends buffers in which files pass through.
var copies = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// one stores a file's content and fills in what is known then. An error is ours; what is wrong with the file is its Error too.
func (h *haul) one(a *Artifact, content io.Reader) (*refusal, error) {
	var why *refusal
	if a.Size > h.k.cfg.MaxFileSize {
		why = refuse("too_large", "it has %s, and a file of more than %s is not kept: it is still in the sandbox", human(a.Size), human(h.k.cfg.MaxFileSize))
	} else {
		why = h.book.take(a.Size)
	}
	if why != nil {
		*a = h.k.reject(*a, why)
		return why, nil
	}
	reserved := a.Size
	why, err := h.store(a, content, &reserved)
	if err != nil || why != nil {
		h.book.give(reserved)
	}
	if why != nil {
		*a = h.k.reject(*a, why)
	}
	return why, err
}

// store copies a file into a blob and claims it. reserved is corrected to what the file really had.
func (h *haul) store(a *Artifact, content io.Reader, reserved *int64) (*refusal, error) {
	d, err := h.k.blobs.Draft(h.tenant)
	if err != nil {
		return nil, err
	}
	given := false
	defer func() {
		if !given {
			d.Drop()
		}
	}()
	h.k.cfg.Step("draft")
	head, why, err := h.pour(d, content)
	if err != nil || why != nil {
		return why, err
	}
	if d.Size() != a.Size { // it changed while it was read: what was read is what is kept
		h.book.give(*reserved)
		if why := h.book.take(d.Size()); why != nil {
			h.book.takeBack(*reserved)
			return why, nil
		}
		*reserved, a.Size = d.Size(), d.Size()
	}
	h.k.cfg.Step("written")
	a.ID, a.SHA256, a.MIME = newID(), d.Sum(), sniff(a.Name, head)
	ref := Ref{h.tenant, a.SHA256}
	h.k.claims.want(ref)
	h.refs = append(h.refs, ref)
	given = true
	return nil, h.placing.put(d, func() { h.k.cfg.Step("placed") })
}

// takeBack takes room without asking: it was just given.
func (b *book) takeBack(size int64) {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	b.add(size, 1)
}

// pour copies until the end and gives the first bytes back.
func (h *haul) pour(d Draft, content io.Reader) (head []byte, why *refusal, err error) {
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	for {
		n, rerr := content.Read(*buf)
		if len(head) < sniffed {
			head = append(head, (*buf)[:min(n, sniffed-len(head))]...)
		}
		if d.Size()+int64(n) > h.k.cfg.MaxFileSize {
			return nil, refuse("changed", "it grew while it was read, beyond what is kept: it is still in the sandbox"), nil
		}
		if _, err := d.Write((*buf)[:n]); err != nil {
			return nil, nil, err
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return head, nil, nil
		case fault.Is(rerr, fault.Conflict):
			return nil, refuse("changed", "%.300s", fault.Message(rerr)), nil
		case rerr != nil:
			return nil, nil, rerr
		}
	}
}

// commit makes the files known: bytes first, names second.
func (h *haul) commit(ctx context.Context) error {
	if err := h.placing.wait(); err != nil {
		return err
	}
	if len(h.refs) == 0 {
		return nil
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	var rows []Artifact
	for i := range h.list {
		a := &h.list[i]
		if a.ID == "" {
			continue
		}
		a.Created = now
		if h.k.cfg.Retention > 0 {
			a.Expires = now.Add(h.k.cfg.Retention)
		}
		rows = append(rows, *a)
	}
	if err := h.k.index.AddArtifacts(ctx, rows, h.datasets); err != nil {
		return err
	}
	h.committed = true
	h.k.cfg.Step("committed")
	h.k.settler.wake()
	for i, a := range rows {
		h.k.cfg.Observer.ArtifactKept(a.Size, !h.placing.fresh[i])
	}
	return nil
}

// discard removes what was kept from the box. What changed meanwhile stays, and comes with the next collection.
func (h *haul) discard(ctx context.Context, from *agentapi.Client, dir string) error {
	var done []agentapi.Found
	for i, a := range h.list {
		if a.ID != "" {
			done = append(done, h.found[i])
		}
	}
	if len(done) == 0 {
		return nil
	}
	err := discard(ctx, from, dir, done)
	h.k.cfg.Step("discarded")
	return err
}

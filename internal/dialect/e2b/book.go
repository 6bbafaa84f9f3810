package e2b

import (
	"container/list"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/covehq/cove/internal/dialect/e2b/target"
)

// What the logs of all sandboxes may hold. They are kept in memory: a restart loses what processes said, while what
// happened to a sandbox is in its events.
const (
	maxLine     = 8 << 10  // bytes of a text
	maxLines    = 2000     // of a sandbox
	maxBytes    = 1 << 20  // of a sandbox
	maxAllBytes = 32 << 20 // of all
	lineCost    = 128      // bytes of a line beside its texts
)

// book holds the last lines of each sandbox that says something. Once it is full, whoever said nothing for the longest
// time is forgotten: also the sandboxes that are gone, of whose log nobody but the book knows any more.
type book struct {
	mu     sync.Mutex
	pages  map[string]*list.Element // of *page, by sandbox
	recent *list.List               // the one written last is first
	bytes  int
}

type page struct {
	id    string
	lines []target.Line
	bytes int
}

func newBook() *book { return &book{pages: map[string]*list.Element{}, recent: list.New()} }

func (b *book) write(id string, line target.Line) {
	line = bounded(line)
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.pages[id]
	if at == nil {
		at = b.recent.PushFront(&page{id: id})
		b.pages[id] = at
	}
	b.recent.MoveToFront(at)
	p := at.Value.(*page)
	b.add(p, cost(line))
	p.lines = append(p.lines, line)
	for len(p.lines) > 1 && (len(p.lines) > maxLines || p.bytes > maxBytes) {
		b.add(p, -cost(p.lines[0]))
		p.lines[0] = target.Line{} // its texts are free although the array is not
		p.lines = p.lines[1:]
	}
	for b.bytes > maxAllBytes && b.recent.Len() > 1 {
		b.forget(b.recent.Back())
	}
}

// add counts bytes of a page; mu is held.
func (b *book) add(p *page, n int) {
	p.bytes += n
	b.bytes += n
}

// forget drops a page; mu is held.
func (b *book) forget(at *list.Element) {
	p := b.recent.Remove(at).(*page)
	delete(b.pages, p.id)
	b.bytes -= p.bytes
}

// read is a copy of what a sandbox said, oldest first.
func (b *book) read(id string) []target.Line {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.pages[id]
	if at == nil {
		return nil
	}
	return slices.Clone(at.Value.(*page).lines)
}

func cost(line target.Line) int {
	n := lineCost + len(line.Message) + len(line.Logger)
	for k, v := range line.Fields {
		n += len(k) + len(v) + lineCost
	}
	return n
}

// bounded is a line of which no text is too long.
func bounded(line target.Line) target.Line {
	line.Message = cut(line.Message, maxLine)
	fields := make(map[string]string, len(line.Fields))
	for k, v := range line.Fields {
		fields[cut(k, maxLine)] = cut(v, maxLine)
	}
	line.Fields = fields // a copy: the one who says it may go on to use his own
	return line
}

// cut shortens a text at the end of a character.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most]
}

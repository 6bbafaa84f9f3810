package agentsandbox

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// How long watches last, in seconds, and how often one that asked for them hears which version it has.
const (
	maxWatch     = 3600
	defaultWatch = 1800
	bookmarkGap  = time.Minute
	writeGrace   = 30 * time.Second // for a client to take what it is sent
)

// watch tells of changes as they happen, for as long as the client asks.
func (a *API) watch(c *call) error {
	how, err := accepted(c.r)
	if err != nil {
		return err
	}
	if c.to.name != "" {
		c.q.selector.fields = append(c.q.selector.fields, requirement{"metadata.name", []string{c.to.name}, false})
	}
	from, err := c.from()
	if err != nil {
		return err
	}
	r := a.store.realm(c.who.Tenant)
	done, ok := r.watch(a.cfg.MaxWatches)
	if !ok {
		return refuse(http.StatusTooManyRequests, reasonTooMany, "there are %d watches of this tenant, which is the limit; end one first", a.cfg.MaxWatches)
	}
	defer done()
	s := &stream{api: a, call: c, realm: r, kind: c.to.kind, how: how, seen: from, to: http.NewResponseController(c.w)}
	if s.kind == podKind {
		s.kind = sandboxKind
	}
	if from == 0 {
		return s.run(true)
	}
	if _, _, ok := r.since(s.kind, from); !ok || from > r.version() { // a later one is another server's, whose clock is ahead
		return refuse(http.StatusGone, reasonExpired, "too old resource version: %d (%d)", from, r.version())
	}
	return s.run(c.q.initial)
}

// from is the version that a client has seen; zero: none.
func (c *call) from() (uint64, error) {
	given := c.q.Get("resourceVersion")
	if given == "" {
		return 0, nil
	}
	rv, err := strconv.ParseUint(given, 10, 64)
	if err != nil {
		return 0, badRequest("invalid resource version %.40q: want a number that this server has given out", given)
	}
	return rv, nil
}

// stream is one watch as it goes on.
type stream struct {
	api   *API
	call  *call
	realm *realm
	kind  *kind // whose changes it tells of: a Pod's are those of its Sandbox
	how   format
	seen  uint64 // up to here everything was sent
	to    *http.ResponseController
	begun bool // the columns of a table have been sent
}

func (s *stream) run(initial bool) error {
	s.call.w.Header().Set("Content-Type", typeJSON)
	s.call.w.Header().Set("Cache-Control", "no-cache, private")
	s.call.w.WriteHeader(http.StatusOK)
	if initial && !s.all() {
		return nil
	}
	if s.to.Flush() != nil {
		return nil // the client has gone
	}
	length := s.call.q.timeout
	if length == 0 {
		length = defaultWatch * time.Second
	}
	over := time.NewTimer(length)
	defer over.Stop()
	marks := time.NewTicker(bookmarkGap)
	defer marks.Stop()
	for {
		events, more, ok := s.realm.since(s.kind, s.seen)
		if !ok || !s.send(events) {
			return nil // too far behind: the client asks again and hears so
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-more:
		case <-marks.C:
			if s.call.q.bookmarks && !s.bookmark(nil) {
				return nil
			}
		case <-over.C:
			return nil
		case <-s.call.ctx().Done():
			return nil
		case <-s.api.quit:
			return nil
		}
	}
}

// all sends what there is, as a watch without a version begins.
func (s *stream) all() bool {
	objects, rv := s.current()
	for _, o := range objects {
		if s.call.q.selector.matches(o) && !s.write("ADDED", o, o.rv) {
			return false
		}
	}
	s.seen = rv
	return !s.call.q.initial || s.bookmark(fields{"k8s.io/initial-events-end": "true"})
}

// current is what there is, as of which version.
func (s *stream) current() ([]*object, uint64) {
	if s.kind == s.call.to.kind {
		return s.api.all(s.call.who.Tenant, s.kind, s.call.to.namespace)
	}
	rv := s.realm.version() // before they are looked at, so that nothing falls in between
	return s.api.pods(s.call), rv
}

// send sends changes as the selector sees them: what it stops to choose is gone.
func (s *stream) send(events []event) bool {
	for _, e := range events {
		if s.kind != s.call.to.kind {
			e.now, e.was = podOf(e.now), podOf(e.was)
		}
		is, was := s.chooses(e.now), s.chooses(e.was)
		ok := true
		switch {
		case is && was:
			ok = s.write("MODIFIED", e.now, e.rv)
		case is:
			ok = s.write("ADDED", e.now, e.rv)
		case was && e.now != nil:
			ok = s.write("DELETED", e.now, e.rv)
		case was:
			ok = s.write("DELETED", e.was, e.rv)
		}
		if !ok {
			return false
		}
		s.seen = e.rv
	}
	return len(events) == 0 || s.to.Flush() == nil
}

func (s *stream) chooses(o *object) bool {
	return o != nil && (s.call.to.namespace == "" || o.namespace() == s.call.to.namespace) && s.call.q.selector.matches(o)
}

func (s *stream) write(kind string, o *object, rv uint64) bool {
	view := s.api.viewOf(s.call, o)
	if o.rv != rv && rv != 0 { // of one that was deleted it is the version of that
		view["metadata"] = with(inner(view, "metadata"), "resourceVersion", formatVersion(rv))
	}
	switch s.how {
	case formatTable:
		columns := o.kind.columns
		if s.begun {
			columns = nil
		}
		s.begun = true
		view = table([]fields{row(o, view, s.call.q.Get("includeObject"))}, columns, formatVersion(rv), "")
	case formatMetadata:
		view = partial(view)
	case formatWhole:
	}
	return s.line(kind, view)
}

func (s *stream) bookmark(annotations fields) bool {
	meta := fields{"resourceVersion": formatVersion(s.seen)}
	if annotations != nil {
		meta["annotations"] = annotations
	}
	k := s.call.to.kind
	view := fields{"kind": k.name, "apiVersion": k.apiVersion(s.call.to.version), "metadata": meta}
	if s.how == formatTable {
		view = table([]fields{{"cells": []any{}, "object": partial(view)}}, nil, formatVersion(s.seen), "")
	}
	return s.line("BOOKMARK", view) && s.to.Flush() == nil
}

// line writes one event. There is never an empty line between two: Python's clients would stumble over it.
func (s *stream) line(kind string, view fields) bool {
	_ = s.to.SetWriteDeadline(time.Now().Add(writeGrace)) // a writer without deadlines has no client that could stall
	return json.NewEncoder(s.call.w).Encode(fields{"type": kind, "object": view}) == nil
}

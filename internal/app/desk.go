package app

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/fleet"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// materials is what dialects are built from.
type materials struct {
	store     *sqlstore.Store
	manager   *sandbox.Manager
	domain    domain
	keys      *auth.Keys
	parts     parts
	images    *image.Service
	telemetry *telemetry.Observer
}

// desk is what one server alone does, because its state is in memory and in files: sessions with all that belongs to them, and the
// façade of Kubernetes. A server without others is always at it; of several the first one is, for as long as it is the first.
type desk struct {
	s     *Server
	from  materials
	plain http.Handler // our API without what belongs to sessions; nil: there are no other servers
	now   atomic.Pointer[term]
}

// term is one time at the desk.
type term struct {
	*Server    // its ladder is the term's own where there are other servers
	api, links http.Handler
}

// openDesk sits down at once where there is nobody else who could.
func (s *Server) openDesk(ctx context.Context, from materials) (*desk, error) {
	d := &desk{s: s, from: from}
	s.desk = d
	if s.team == nil {
		t, err := s.openTerm(ctx, from)
		d.now.Store(t)
		return d, err
	}
	d.plain = s.newAPI(from)
	s.quitSessions = d.quitSessions
	from.telemetry.WatchSessions(d.census)
	return d, nil
}

// newAPI is our own API with what every server does.
func (s *Server) newAPI(from materials) *cove.API {
	api := cove.New(from.domain, from.keys, from.parts.templates, s.log)
	api.OnFailure(from.telemetry.Failed)
	api.SetImages(coveImages{from.images})
	api.SetVolumes(from.manager)
	s.openSnippets(api, from.domain)
	return api
}

// openTerm opens all of it. What it began is in the ladder of s, also after an error.
func (s *Server) openTerm(ctx context.Context, from materials) (*term, error) {
	api, links := s.newAPI(from), http.Handler(http.NotFoundHandler())
	if s.keepsFiles() {
		keeper, err := s.openArtifacts(from.store, from.telemetry)
		if err != nil {
			return nil, err
		}
		api.SetArtifacts(keeper)
		links = cove.NewLinks(keeper, s.log)
		datasets, err := s.openDatasets(from.store, from.telemetry)
		if err != nil {
			return nil, err
		}
		sessions, err := s.openSessions(api, from.store, from.domain, from.parts, keeper, datasets, from.telemetry)
		if err != nil {
			return nil, err
		}
		api.SetDatasets(session.NewData(sessions, s.tracedDatasets(datasets), s.log))
	}
	if s.facade != nil {
		if err := s.openAgentSandbox(ctx, from.store, from.domain, from.keys, from.images, from.parts.templates, from.telemetry); err != nil {
			return nil, err
		}
		api.SetKubernetes(s.facade)
	}
	return &term{Server: s, api: api, links: links}, nil
}

// keepsFiles tells whether there is a place for files that outlives this server.
func (s *Server) keepsFiles() bool { return s.cfg.Server.Replicas <= 1 || s.cfg.Server.SharedVolume }

// Take sits down: this server is the first now, and everything that the one before had is its own.
func (d *desk) Take(ctx context.Context) error {
	branch := d.s.branch()
	t, err := branch.openTerm(ctx, d.from)
	if err != nil {
		if undone := branch.undo.run(); undone != nil {
			d.s.log.Warn("what only the first server does was not given up cleanly", "error", undone)
		}
		return err
	}
	d.now.Store(t)
	return nil
}

// Resign gets up: another server is the first.
func (d *desk) Resign() {
	t := d.now.Swap(nil)
	if t == nil {
		return
	}
	if t.facade != nil {
		t.facade.api.Quit()
	}
	if t.quitSessions != nil {
		t.quitSessions()
	}
	if err := t.undo.run(); err != nil {
		d.s.log.Warn("what only the first server does was not given up cleanly", "error", err)
	}
}

// branch is this server with a ladder of its own.
func (s *Server) branch() *Server {
	b := &Server{
		URL: s.URL, Domain: s.Domain, CAFile: s.CAFile, Key: s.Key, Caps: s.Caps, KeyFile: s.KeyFile, cfg: s.cfg, log: s.log,
		tracing: s.tracing, store: s.store, team: s.team, desk: s.desk,
	}
	if s.facade != nil {
		facade := *s.facade
		b.facade = &facade
	}
	return b
}

// watchSessions has sessions counted. Where terms come and go, the desk is asked who counts.
func (s *Server) watchSessions(o *telemetry.Observer, census func(context.Context) (map[string]int, error)) {
	if s.team == nil {
		o.WatchSessions(census)
		return
	}
	s.sessionCensus.Store(&census)
}

func (d *desk) census(ctx context.Context) (map[string]int, error) {
	if t := d.now.Load(); t != nil {
		if count := t.sessionCensus.Load(); count != nil {
			return (*count)(ctx)
		}
	}
	return nil, nil
}

func (d *desk) quitSessions() {
	if t := d.now.Load(); t != nil && t.quitSessions != nil {
		t.quitSessions()
	}
}

// quit ends watches of the façade.
func (d *desk) quit() {
	if t := d.now.Load(); t != nil && t.facade != nil {
		t.facade.api.Quit()
	}
}

// atDesk answers by whoever is at the desk; nobody is for a moment, after the first server is gone.
func (d *desk) atDesk(pick func(*term) http.Handler, otherwise http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch t := d.now.Load(); {
		case t != nil:
			pick(t).ServeHTTP(w, r)
		case otherwise != nil:
			otherwise.ServeHTTP(w, r)
		default:
			fleet.Refuse(w, "the server that did this is gone; another takes over, try again")
		}
	})
}

func (d *desk) api() http.Handler {
	return d.atDesk(func(t *term) http.Handler { return t.api }, d.plain)
}

func (d *desk) links() http.Handler {
	return d.atDesk(func(t *term) http.Handler { return t.links }, nil)
}

func (d *desk) kubernetes() http.Handler {
	return d.atDesk(func(t *term) http.Handler { return t.facade.api }, http.HandlerFunc(refuseKubernetes))
}

// entrance is the router of agent-sandbox as the gateway sees it; nil: there is none.
func (d *desk) entrance() gateway.Entrance {
	if d.s.facade == nil {
		return nil
	}
	if d.s.team == nil {
		return d.s.facade.router
	}
	return deskRouter{d.atDesk(func(t *term) http.Handler { return t.facade.router }, nil)}
}

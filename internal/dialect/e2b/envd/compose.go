package envd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxCompose = 1 << 20 // bytes of a request
	maxSources = 10_000
)

// compose makes one file of several.
func (h *Handler) compose(w http.ResponseWriter, r *http.Request) {
	file, err := h.composed(r)
	if err != nil {
		h.refuseFault(r.Context(), w, err)
		return
	}
	respond(w, http.StatusOK, file)
}

func (h *Handler) composed(r *http.Request) (written, error) {
	if err := h.permitToken(r); err != nil {
		return written{}, err
	}
	var req struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		Username    string   `json:"username"`
	}
	body, err := transfer.ReadJSON(r.Context(), target.From(r.Context()).Who.Tenant, io.LimitReader(r.Body, maxCompose))
	if told := (*fault.Error)(nil); errors.As(err, &told) {
		return written{}, err
	}
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(body)).Decode(&req)
	}
	if err != nil {
		return written{}, fault.Wrap(fault.Invalid, err, "the body is not the JSON of a compose: %v", err)
	}
	if len(req.Sources) == 0 || len(req.Sources) > maxSources || req.Destination == "" {
		return written{}, fault.New(fault.Invalid, "a compose has a destination and 1 to %d source_paths", maxSources)
	}
	ctx := r.Context()
	p, err := h.at(ctx, req.Username)
	var unknown errUser
	if errors.As(err, &unknown) {
		return written{}, fault.New(fault.Unauthed, "%s", unknown.Error())
	}
	if err != nil {
		return written{}, err
	}
	to, err := p.resolve(ctx, req.Destination)
	if err != nil {
		return written{}, err
	}
	chain := &sources{ctx: ctx, place: p, left: req.Sources}
	defer chain.Close()
	// Not in place: the destination may be one of the sources.
	e, err := p.Write(ctx, agentapi.WriteParams{Path: to, User: p.user, Root: true}, chain)
	switch {
	case chain.failed != nil:
		return written{}, chain.failed
	case err != nil:
		return written{}, unwritten(to, nil, err)
	}
	return written{Name: e.Name, Path: e.Path, Type: "file"}, nil
}

// sources reads files one after the other.
type sources struct {
	ctx    context.Context // of the request that it serves; it lives no longer
	place  *place
	left   []string
	open   io.ReadCloser
	failed error
}

func (s *sources) Read(p []byte) (int, error) {
	for {
		if s.open == nil {
			if len(s.left) == 0 {
				return 0, io.EOF
			}
			if s.failed = s.next(); s.failed != nil {
				return 0, s.failed
			}
		}
		n, err := s.open.Read(p)
		if err == io.EOF {
			s.Close()
			err = nil
		}
		if n > 0 || err != nil {
			s.failed = err
			return n, err
		}
	}
}

func (s *sources) next() error {
	at, err := s.place.resolve(s.ctx, s.left[0])
	if err != nil {
		return err
	}
	s.left = s.left[1:]
	_, content, err := s.place.Client.Read(s.ctx, agentapi.ReadParams{Path: at, User: s.place.user, Root: true})
	if err != nil {
		return unreadable(at, err)
	}
	s.open = content
	return nil
}

func (s *sources) Close() error {
	if s.open != nil {
		s.open.Close()
		s.open = nil
	}
	return nil
}

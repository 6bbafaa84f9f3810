package envd

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/fault"
)

// filesystem is the service filesystem.Filesystem. E2B's daemon is root: it may look and write everywhere, and what it
// makes it gives to the user.
type filesystem struct{ *Handler }

// maxDepth is how deep a listing goes at most; what lies deeper is left out.
const maxDepth = 64

// find is where a request acts and the path that it names.
func (s *filesystem) find(ctx context.Context, header http.Header, name string) (*place, string, error) {
	p, err := s.rpc(ctx, header)
	if err != nil {
		return nil, "", err
	}
	at, err := p.resolve(ctx, name)
	if err != nil {
		return nil, "", s.failed(ctx, err)
	}
	return p, at, nil
}

func (s *filesystem) Stat(ctx context.Context, req *connect.Request[envdpb.StatRequest]) (*connect.Response[envdpb.StatResponse], error) {
	p, at, err := s.find(ctx, req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := p.Stat(ctx, agentapi.PathParams{Path: at, User: p.user, Root: true})
	if err != nil {
		return nil, s.missing(ctx, "file not found", err)
	}
	return connect.NewResponse(&envdpb.StatResponse{Entry: entryInfo(&e)}), nil
}

// missing says what was not found; other failures speak for themselves.
func (s *filesystem) missing(ctx context.Context, what string, err error) error {
	if fault.Is(err, fault.NotFound) {
		err = fault.Wrap(fault.NotFound, err, "%s: %s", what, fault.Message(err))
	}
	return s.failed(ctx, err)
}

func (s *filesystem) MakeDir(ctx context.Context, req *connect.Request[envdpb.MakeDirRequest]) (*connect.Response[envdpb.MakeDirResponse], error) {
	p, at, err := s.find(ctx, req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := p.Stat(ctx, agentapi.PathParams{Path: at, User: p.user, Root: true})
	if err == nil && (e.Link != nil || e.Type != agentapi.EntrySymlink) {
		return nil, taken(&e)
	}
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, s.failed(ctx, err)
	}
	e, err = p.Mkdir(ctx, agentapi.MkdirParams{Path: at, User: p.user, Root: true, Parents: true})
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&envdpb.MakeDirResponse{Entry: entryInfo(&e)}), nil
}

// taken says what stands where a directory was to be made.
func taken(e *agentapi.Entry) error {
	if e.Type == agentapi.EntryDir || e.Link != nil && e.Link.Type == agentapi.EntryDir {
		return connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", e.Path))
	}
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but it is not a directory: %s", e.Path))
}

func (s *filesystem) Move(ctx context.Context, req *connect.Request[envdpb.MoveRequest]) (*connect.Response[envdpb.MoveResponse], error) {
	p, from, err := s.find(ctx, req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := p.resolve(ctx, req.Msg.GetDestination())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	e, err := p.Move(ctx, agentapi.MoveParams{From: from, To: to, User: p.user, Root: true})
	if err != nil {
		return nil, s.missing(ctx, "source file not found", err)
	}
	return connect.NewResponse(&envdpb.MoveResponse{Entry: entryInfo(&e)}), nil
}

func (s *filesystem) ListDir(ctx context.Context, req *connect.Request[envdpb.ListDirRequest]) (*connect.Response[envdpb.ListDirResponse], error) {
	p, at, err := s.find(ctx, req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	depth := int(max(1, min(req.Msg.GetDepth(), maxDepth)))
	list, err := p.List(ctx, agentapi.ListParams{Path: at, User: p.user, Root: true, Depth: depth})
	if err != nil {
		return nil, s.notDir(ctx, at, err)
	}
	answer := &envdpb.ListDirResponse{Entries: make([]*envdpb.EntryInfo, len(list))}
	for i := range list {
		answer.Entries[i] = entryInfo(&list[i])
	}
	return connect.NewResponse(answer), nil
}

// notDir says what is wrong with a path that should be a directory's.
func (s *filesystem) notDir(ctx context.Context, at string, err error) error {
	switch err = s.explain(ctx, err); fault.KindOf(err) {
	case fault.Invalid:
		if strings.HasSuffix(fault.Message(err), agentapi.TooManyLinks) {
			return connect.NewError(connect.CodeFailedPrecondition, errors.New("cyclic symlink or chain of links that is too long: "+at))
		}
		return connect.NewError(connect.CodeInvalidArgument, errors.New("path is not a directory: "+at))
	case fault.NotFound:
		return connect.NewError(connect.CodeNotFound, errors.New("directory not found: "+at))
	case fault.Internal, fault.Denied, fault.Unauthed, fault.Conflict, fault.Exhausted, fault.DiskFull, fault.Timeout, fault.Unavailable, fault.Gone, fault.Unsupported:
	}
	return s.failed(ctx, err)
}

func (s *filesystem) Remove(ctx context.Context, req *connect.Request[envdpb.RemoveRequest]) (*connect.Response[envdpb.RemoveResponse], error) {
	p, at, err := s.find(ctx, req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	err = p.Remove(ctx, agentapi.RemoveParams{Path: at, User: p.user, Root: true, Recursive: true})
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&envdpb.RemoveResponse{}), nil
}

package envd

import (
	"context"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// watchable is what WatchDirRequest and CreateWatcherRequest have in common. That a file system is a network's is not
// asked: a sandbox has none that would not tell.
type watchable interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
}

// watching is the changes below a directory.
type watching struct {
	stream *agentapi.Stream
	base   string
}

// watch begins to watch what a request names, for as long as ctx lives.
func (s *filesystem) watch(ctx, life context.Context, header http.Header, m watchable) (*watching, error) {
	p, at, err := s.find(ctx, header, m.GetPath())
	if err != nil {
		return nil, err
	}
	stream, err := p.Watch(life, agentapi.WatchParams{
		Path: at, User: p.user, Root: true, Recursive: m.GetRecursive(), Entries: m.GetIncludeEntry(),
	})
	if err != nil {
		return nil, s.notDir(ctx, at, err)
	}
	return &watching{stream: stream, base: at}, nil
}

var eventTypes = map[string]envdpb.EventType{
	"create": envdpb.EventType_EVENT_TYPE_CREATE, "write": envdpb.EventType_EVENT_TYPE_WRITE,
	"remove": envdpb.EventType_EVENT_TYPE_REMOVE, "rename": envdpb.EventType_EVENT_TYPE_RENAME,
	"chmod": envdpb.EventType_EVENT_TYPE_CHMOD,
}

// event is a change as E2B tells it: by its name below the watched directory.
func (w *watching) event(e *agentapi.FileEvent) *envdpb.FilesystemEvent {
	name := strings.TrimPrefix(strings.TrimPrefix(e.Path, w.base), "/")
	if name == "" {
		name = "."
	}
	event := &envdpb.FilesystemEvent{Name: name, Type: eventTypes[e.Op]}
	if e.Entry != nil {
		event.Entry = entryInfo(e.Entry)
	}
	return event
}

func (s *filesystem) WatchDir(ctx context.Context, req *connect.Request[envdpb.WatchDirRequest], out *connect.ServerStream[envdpb.WatchDirResponse]) error {
	w, err := s.watch(ctx, ctx, req.Header(), req.Msg)
	if err != nil {
		return err
	}
	defer w.stream.Close()
	tell := newTeller(out, req.Header(), &envdpb.WatchDirResponse{
		Event: &envdpb.WatchDirResponse_Keepalive{Keepalive: &envdpb.WatchDirResponse_KeepAlive{}}})
	defer tell.close()
	for e, err := range w.stream.Events() {
		if err == nil {
			err = s.tellChange(ctx, tell, w, &e)
		}
		if err != nil {
			return s.failed(ctx, err)
		}
	}
	return s.failed(ctx, fault.New(fault.Unavailable, "the watch has ended"))
}

func (s *filesystem) tellChange(ctx context.Context, tell *teller[envdpb.WatchDirResponse], w *watching, e *agentapi.Event) error {
	switch e.Type {
	case agentapi.EventStarted:
		return tell.send(&envdpb.WatchDirResponse{Event: &envdpb.WatchDirResponse_Start{Start: &envdpb.WatchDirResponse_StartEvent{}}})
	case agentapi.EventFile:
		return tell.send(&envdpb.WatchDirResponse{Event: &envdpb.WatchDirResponse_Filesystem{Filesystem: w.event(e.File)}})
	case agentapi.EventNotice:
		target.From(ctx).Log(target.Line{At: e.Time, Level: "warn", Logger: "filesystem", Message: e.Message})
	}
	return nil
}

func (s *filesystem) CreateWatcher(ctx context.Context, req *connect.Request[envdpb.CreateWatcherRequest]) (*connect.Response[envdpb.CreateWatcherResponse], error) {
	id := target.From(ctx).Sandbox.ID
	p, err := s.pollers.add(id, func(life context.Context) (*watching, error) {
		return s.watch(ctx, life, req.Header(), req.Msg)
	})
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&envdpb.CreateWatcherResponse{WatcherId: p.id}), nil
}

func (s *filesystem) GetWatcherEvents(ctx context.Context, req *connect.Request[envdpb.GetWatcherEventsRequest]) (*connect.Response[envdpb.GetWatcherEventsResponse], error) {
	if _, err := s.rpc(ctx, req.Header()); err != nil {
		return nil, err
	}
	p, err := s.pollers.find(target.From(ctx).Sandbox.ID, req.Msg.GetWatcherId())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	events, err := p.take(ctx)
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	return connect.NewResponse(&envdpb.GetWatcherEventsResponse{Events: events}), nil
}

func (s *filesystem) RemoveWatcher(ctx context.Context, req *connect.Request[envdpb.RemoveWatcherRequest]) (*connect.Response[envdpb.RemoveWatcherResponse], error) {
	if _, err := s.rpc(ctx, req.Header()); err != nil {
		return nil, err
	}
	p, err := s.pollers.find(target.From(ctx).Sandbox.ID, req.Msg.GetWatcherId())
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	p.cancel()
	<-p.done
	return connect.NewResponse(&envdpb.RemoveWatcherResponse{}), nil
}

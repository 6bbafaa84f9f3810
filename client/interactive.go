package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"sync"
)

// Session is an interactive command: its output is read by Events, its stdin written by Write.
type Session struct {
	conn io.ReadWriteCloser
	stop func() bool

	mu sync.Mutex // one frame at a time
}

// Start starts an interactive command, with a terminal when req has a PTY. The caller reads Events and closes it.
func (s *Sandbox) Start(ctx context.Context, req ExecRequest) (*Session, error) {
	session, err := s.converse(ctx, "exec")
	if err != nil {
		return nil, err
	}
	if err := session.sendJSON(FrameStart, req); err != nil {
		session.Close()
		return nil, fmt.Errorf("start command: %w", err)
	}
	return session, nil
}

// Attach joins a command that was started earlier, by its id, tag or pid. Output comes from now on; closing the session
// leaves the command running.
func (s *Sandbox) Attach(ctx context.Context, process string) (*Session, error) {
	return s.converse(ctx, "processes", process, "attach")
}

// converse switches a connection to frames.
func (s *Sandbox) converse(ctx context.Context, path ...string) (*Session, error) {
	req, err := s.c.request(ctx, http.MethodGet, s.path(path...), nil, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", Protocol)
	resp, err := s.c.receive(req)
	if err != nil {
		return nil, err
	}
	conn, ok := resp.Body.(io.ReadWriteCloser)
	if resp.StatusCode != http.StatusSwitchingProtocols || !ok {
		resp.Body.Close()
		return nil, fmt.Errorf("the server answered %s instead of switching to %s: is there a proxy in between?", resp.Status, Protocol)
	}
	return &Session{conn: conn, stop: context.AfterFunc(ctx, func() { conn.Close() })}, nil
}

// Events yields what the command tells until its end; there is one reader.
func (x *Session) Events() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		r := NewFrameReader(x.conn)
		for {
			kind, payload, err := r.Read()
			if err != nil {
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
					err = errCut
				}
				yield(Event{}, err)
				return
			}
			e, err := eventOf(kind, payload)
			if !yield(e, err) || err != nil || e.Type == EventEnd {
				return
			}
		}
	}
}

func eventOf(kind FrameKind, payload []byte) (Event, error) {
	switch kind {
	case FrameStdout:
		return Event{Type: EventStdout, Base64: payload}, nil
	case FrameStderr:
		return Event{Type: EventStderr, Base64: payload}, nil
	case FrameEvent:
		var e Event
		if err := json.Unmarshal(payload, &e); err != nil {
			return e, fmt.Errorf("event frame: %w", err)
		}
		if e.Type == EventFault && e.Fault != nil {
			return e, &Error{Kind: e.Fault.Kind, Message: e.Fault.Message}
		}
		return e, nil
	}
	return Event{}, fmt.Errorf("the server sent a frame of kind %d, which is the client's to send", kind)
}

// Write feeds the command's stdin.
func (x *Session) Write(p []byte) (int, error) {
	const chunk = 64 << 10
	for at := 0; at < len(p); at += chunk {
		if err := x.send(FrameStdin, p[at:min(at+chunk, len(p))]); err != nil {
			return at, err
		}
	}
	return len(p), nil
}

// CloseStdin tells the command that its input has ended.
func (x *Session) CloseStdin() error { return x.send(FrameEOF, nil) }

// Signal sends a signal such as SIGINT to the command.
func (x *Session) Signal(name string) error { return x.sendJSON(FrameControl, Control{Signal: name}) }

// Resize changes the size of the command's terminal.
func (x *Session) Resize(size PTYSize) error {
	return x.sendJSON(FrameControl, Control{Resize: &size})
}

// Close leaves the command.
func (x *Session) Close() error {
	x.stop()
	return x.conn.Close()
}

func (x *Session) send(kind FrameKind, payload []byte) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return WriteFrame(x.conn, kind, payload)
}

func (x *Session) sendJSON(kind FrameKind, value any) error {
	payload, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return x.send(kind, payload)
}

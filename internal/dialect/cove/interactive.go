package cove

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// startGrace is how long a client that has upgraded may take to say what to run.
const startGrace = 10 * time.Second

// stopGrace is how long a stopping server goes on talking to a client that may not listen.
const stopGrace = time.Second

// interactive turns the connection into frames: see client.Protocol. What can be refused is refused before the switch,
// while an HTTP status is still possible.
func (a *API) interactive(c *call) error {
	if err := wantsFrames(c); err != nil {
		c.w.Header().Set("Allow", http.MethodPost)
		a.refuseMethod(c.w, c.r, fault.Message(err))
		return nil
	}
	if _, err := a.sandboxes.Get(c.ctx(), c.who, c.id()); err != nil {
		return err
	}
	conn, in, err := hijack(c)
	if err != nil {
		return err
	}
	defer conn.Close()

	if err := switchProtocols(conn, c.w.Header().Get("X-Request-Id")); err != nil {
		return nil // the client has gone
	}
	a.converse(c, conn, in)
	return nil
}

// attach joins a command that was started earlier: the same frames, without the first.
func (a *API) attach(c *call) error {
	if err := wantsFrames(c); err != nil {
		return err
	}
	agent, err := a.sandboxes.Agent(c.ctx(), c.who, c.id())
	if err != nil {
		return err
	}

	stream, err := agent.Attach(c.ctx(), agentapi.AttachParams{Target: agentapi.Target{Name: c.r.PathValue("process")}})
	if err != nil {
		return err
	}
	defer stream.Close()
	conn, in, err := hijack(c)
	if err != nil {
		return err
	}
	defer conn.Close()

	if err := switchProtocols(conn, c.w.Header().Get("X-Request-Id")); err != nil {
		return nil // the client has gone
	}
	defer cutWithServer(c, conn)()
	setDeadline(c.ctx(), conn, time.Time{})
	a.talk(c, conn, client.NewFrameReader(in), stream)
	return nil
}

func wantsFrames(c *call) error {
	if headerHas(c.r.Header, "Connection", "upgrade") && headerHas(c.r.Header, "Upgrade", client.Protocol) {
		return nil
	}
	c.w.Header().Set("Upgrade", client.Protocol)
	return fault.New(fault.Invalid, "ask with Connection: Upgrade and Upgrade: %s, or POST for a command without live input", client.Protocol)
}

func hijack(c *call) (net.Conn, *bufio.Reader, error) {
	conn, rw, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		return nil, nil, fault.Wrap(fault.Unsupported, err, "this connection cannot be upgraded; use HTTP/1.1")
	}
	return conn, rw.Reader, nil
}

func headerHas(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

func switchProtocols(conn net.Conn, request string) error {
	if err := conn.SetDeadline(time.Now().Add(startGrace)); err != nil {
		return err
	}
	_, err := conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + client.Protocol +
		"\r\nX-Request-Id: " + request + "\r\n\r\n"))
	return err
}

// converse runs the command of the first frame until it ends, the client leaves or the server stops.
func (a *API) converse(c *call, conn net.Conn, in *bufio.Reader) {
	defer cutWithServer(c, conn)()
	frames := client.NewFrameReader(in)
	params, err := startFrame(frames)
	if err != nil {
		sendFault(c.ctx(), conn, wireFault(err))
		return
	}
	setDeadline(c.ctx(), conn, time.Time{})
	stream, err := a.sandboxes.Exec(c.ctx(), c.who, c.id(), params)
	if err != nil {
		sendFault(c.ctx(), conn, a.broken(c, err))
		return
	}
	a.talk(c, conn, frames, stream)
}

// cutWithServer ends a hijacked connection, which has no context of its own, when the server stops.
func cutWithServer(c *call, conn net.Conn) (stop func() bool) {
	return context.AfterFunc(c.ctx(), func() { conn.SetDeadline(time.Now().Add(stopGrace)) })
}

// talk passes on what the command and the client say to each other, until one of them ends.
func (a *API) talk(c *call, conn net.Conn, frames *client.FrameReader, stream *agentapi.Stream) {
	// The order matters: leave the command, then the client, then wait for the goroutine that reads from one and
	// writes to the other.
	var reading sync.WaitGroup
	defer reading.Wait()
	defer conn.Close()
	defer stream.Close()
	defer context.AfterFunc(c.ctx(), func() { stream.Close() })()
	reading.Go(func() {
		obey(frames, stream)
		stream.Close() // the client has left; OnDisconnect says what that means
	})

	for e, err := range stream.Events() {
		if err == nil {
			err = refused(&e)
		}
		if err != nil {
			sendFault(c.ctx(), conn, a.broken(c, err))
			return
		}
		kind, payload, err := frame(&e)
		if err != nil || client.WriteFrame(conn, kind, payload) != nil {
			return
		}
	}
}

func startFrame(frames *client.FrameReader) (agentapi.ExecParams, error) {
	kind, payload, err := frames.Read()
	if err != nil {
		return agentapi.ExecParams{}, fault.Wrap(fault.Invalid, err, "no start frame came: %v", err)
	}
	if kind != client.FrameStart {
		return agentapi.ExecParams{}, fault.New(fault.Invalid, "the first frame has kind %d; want %d with an ExecRequest", kind, client.FrameStart)
	}
	var req client.ExecRequest
	if err := Decode(payload, &req); err != nil {
		return agentapi.ExecParams{}, err
	}
	if req.Stdin != "" {
		return agentapi.ExecParams{}, fault.New(fault.Invalid, "an interactive command takes stdin as frames of kind %d", client.FrameStdin)
	}
	params, err := execParams(req)
	params.Stdin = true
	return params, err
}

// obey passes on what the client sends until it leaves or breaks the protocol. A command that takes no more has ended or
// is about to: its last word is on the way, so that is no reason to leave it.
func obey(frames *client.FrameReader, stream *agentapi.Stream) {
	for {
		kind, payload, err := frames.Read()
		if err != nil {
			return
		}
		switch kind {
		case client.FrameStdin:
			_ = stream.Stdin(payload)
		case client.FrameEOF:
			_ = stream.CloseStdin()
		case client.FrameControl:
			var ctl client.Control
			if json.Unmarshal(payload, &ctl) != nil {
				return
			}
			_ = stream.Control(agentapi.Control{Signal: ctl.Signal, Resize: (*agentapi.PTYSize)(ctl.Resize)})
		default:
			return
		}
	}
}

// setDeadline gives a conversation more time, unless the server is stopping: whichever of the two comes second, the
// shorter time holds.
func setDeadline(ctx context.Context, conn net.Conn, t time.Time) {
	conn.SetDeadline(t)
	if ctx.Err() != nil {
		conn.SetDeadline(time.Now().Add(stopGrace))
	}
}

func sendFault(ctx context.Context, conn net.Conn, f *client.Fault) {
	setDeadline(ctx, conn, time.Now().Add(startGrace))
	// The client may have gone, and then there is nobody to tell.
	_ = client.WriteJSONFrame(conn, client.FrameEvent, client.Event{Type: client.EventFault, Fault: f})
}

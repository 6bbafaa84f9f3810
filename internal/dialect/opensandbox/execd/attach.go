package execd

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/covehq/cove/internal/agentapi"
)

// What the first byte of a binary message says.
const (
	frameStdin  = 0
	frameStdout = 1
	frameStderr = 2
	frameReplay = 3
)

const (
	maxInput    = 1 << 20
	pingEvery   = 30 * time.Second
	writeFor    = 30 * time.Second // a client that takes longer to read is gone
	statusTaken = websocket.StatusCode(4001)
	outstanding = 16 // messages
)

// attachment is a client of a terminal.
type attachment struct {
	conn  *websocket.Conn
	first [][]byte      // messages of before
	out   chan []byte   // closed by whoever hears the shell, at its end
	gone  chan struct{} // closed when the client is
	taken chan struct{} // closed when another one has come
}

func (h *Handler) attachTerminal(c *call) error {
	t, err := c.room.terminal(c.r.PathValue("id"))
	if err != nil {
		return err
	}
	if !strings.EqualFold(c.r.Header.Get("Upgrade"), "websocket") { // before it begins a shell, or takes one over
		c.w.Header().Set("Upgrade", "websocket")
		return &refusal{http.StatusUpgradeRequired, codeUnsupported, "a terminal is joined by a WebSocket"}
	}
	q := c.r.URL.Query()
	since, err := strconv.ParseInt(q.Get("since"), 10, 64)
	if err != nil || since < 0 {
		since = 0
	}
	a := &attachment{out: make(chan []byte, outstanding), gone: make(chan struct{}), taken: make(chan struct{})}
	if err := h.join(c, t, a, since, q.Get("pty") != "0", q.Get("takeover") == "1"); err != nil {
		return err
	}
	defer t.part(a)
	defer close(a.gone)
	// Whoever comes was let in by what they have shown, not by a cookie that a page could use: any origin may.
	a.conn, err = websocket.Accept(c.w, c.r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // it has answered
	}
	defer a.cut()
	a.conn.SetReadLimit(maxInput)
	h.converse(c, t, a)
	return nil
}

// join makes a client the terminal's own, and begins the shell for the first.
func (h *Handler) join(c *call, t *terminal, a *attachment, since int64, pty, takeover bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attached != nil && !takeover {
		return &refusal{http.StatusConflict, "ALREADY_CONNECTED", "another client is connected to terminal " + t.id}
	}
	if !t.begun {
		if err := h.start(c, t, pty); err != nil {
			return err
		}
	}
	if t.attached != nil {
		close(t.attached.taken)
	}
	a.first = t.replay(since)
	t.attached = a
	if t.over {
		close(a.out)
	}
	return nil
}

// replay is what a client hears first: which terminal it is, and what was told since a place; mu is held.
func (t *terminal) replay(since int64) [][]byte {
	mode := "pipe"
	if t.pty {
		mode = "pty"
	}
	hello, _ := json.Marshal(map[string]string{"type": "connected", "session_id": t.id, "mode": mode}) // plain data
	list := [][]byte{hello}
	if rest, from := t.log.since(since); len(rest) > 0 {
		frame := binary.BigEndian.AppendUint64([]byte{frameReplay}, uint64(from))
		list = append(list, append(frame, rest...))
	}
	return list
}

// part forgets a client that has left.
func (t *terminal) part(a *attachment) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attached == a {
		t.attached = nil
	}
}

// converse passes messages both ways until the client leaves, another takes its place or the shell ends.
func (h *Handler) converse(c *call, t *terminal, a *attachment) {
	ctx, cancel := context.WithCancel(c.ctx())
	defer cancel()
	done := make(chan struct{})
	go func() { // ended by the connection's, and waited for below
		defer close(done)
		defer cancel()
		a.listen(ctx, t)
	}()
	defer func() { a.cut(); <-done }()
	a.speak(ctx, h.life, t)
}

// cut ends the connection, if it has not ended.
func (a *attachment) cut() { _ = a.conn.CloseNow() }

// speak sends what the shell tells.
func (a *attachment) speak(ctx, life context.Context, t *terminal) {
	for i, m := range a.first {
		kind := websocket.MessageBinary
		if i == 0 {
			kind = websocket.MessageText
		}
		if a.send(ctx, kind, m) != nil {
			return
		}
	}
	ping := time.NewTicker(pingEvery)
	defer ping.Stop()
	for {
		select {
		case m, more := <-a.out:
			if !more {
				a.farewell(ctx, t)
				return
			}
			if a.send(ctx, websocket.MessageBinary, m) != nil {
				return
			}
		case <-ping.C:
			if a.alive(ctx) != nil {
				return
			}
		case <-a.taken:
			_ = a.conn.Close(statusTaken, "another client has taken over")
			return
		case <-life.Done():
			_ = a.conn.Close(websocket.StatusGoingAway, "the server is shutting down")
			return
		case <-ctx.Done():
			return
		}
	}
}

func (a *attachment) farewell(ctx context.Context, t *terminal) {
	t.part(a) // before the client hears of it, which may come again at once
	t.mu.Lock()
	last, _ := json.Marshal(map[string]any{"type": "exit", "exit_code": t.exit}) // plain data
	t.mu.Unlock()
	if a.send(ctx, websocket.MessageText, last) == nil {
		_ = a.conn.Close(websocket.StatusNormalClosure, "the shell has ended") // a client that has gone needs none
	}
}

func (a *attachment) send(ctx context.Context, kind websocket.MessageType, m []byte) error {
	ctx, cancel := context.WithTimeout(ctx, writeFor)
	defer cancel()
	return a.conn.Write(ctx, kind, m)
}

func (a *attachment) alive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingEvery)
	defer cancel()
	return a.conn.Ping(ctx)
}

// listen takes what the client says.
func (a *attachment) listen(ctx context.Context, t *terminal) {
	for {
		kind, m, err := a.conn.Read(ctx)
		if err != nil {
			return
		}
		if kind == websocket.MessageBinary {
			if len(m) > 1 && m[0] == frameStdin && t.stream.Stdin(m[1:]) != nil {
				return
			}
			continue
		}
		if answer := t.order(m); answer != "" && a.send(ctx, websocket.MessageText, []byte(answer)) != nil {
			return
		}
	}
}

// order does what a text message asks and gives the answer, if it has one.
func (t *terminal) order(m []byte) (answer string) {
	var req struct {
		Type   string `json:"type"`
		Data   string `json:"data"`
		Signal string `json:"signal"`
		Cols   int    `json:"cols"`
		Rows   int    `json:"rows"`
	}
	if json.Unmarshal(m, &req) != nil {
		return `{"type":"error","code":"INVALID_MESSAGE","message":"the message is not JSON"}`
	}
	var err error
	switch req.Type {
	case "stdin":
		err = t.stream.Stdin([]byte(req.Data))
	case "signal":
		err = t.stream.Control(agentapi.Control{Signal: req.Signal})
	case "resize":
		clamp := func(n int) uint16 { return uint16(min(max(n, 1), math.MaxUint16)) }
		err = t.stream.Control(agentapi.Control{Resize: &agentapi.PTYSize{Rows: clamp(req.Rows), Cols: clamp(req.Cols)}})
	case "ping":
		return `{"type":"pong"}`
	default:
		return `{"type":"error","code":"INVALID_MESSAGE","message":"a message is stdin, signal, resize or ping"}`
	}
	if err != nil {
		return `{"type":"error","code":"RUNTIME_ERROR","message":"the terminal has ended"}`
	}
	return ""
}

package execd_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// client is somebody at a terminal.
type client struct {
	t     *testing.T
	conn  *websocket.Conn
	heard bytes.Buffer // output and replays, without what says which
	texts []map[string]any
	first int64 // place of the replay; -1: none
	kinds []byte
}

func (w *world) terminal(t *testing.T, body any) string {
	t.Helper()
	var made struct {
		ID string `json:"session_id"`
	}
	a := w.ask("POST", "/pty", body)
	if a.status != 201 {
		t.Fatalf("got %+v", a)
	}
	w.json(a, &made)
	return made.ID
}

func (w *world) sit(t *testing.T, id, query string) *client {
	t.Helper()
	conn, _, err := websocket.Dial(t.Context(), strings.Replace(w.URL, "http", "ws", 1)+"/pty/"+id+"/ws?"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetReadLimit(4 << 20)
	t.Cleanup(func() { conn.CloseNow() })
	return &client{t: t, conn: conn, first: -1}
}

func (c *client) say(kind websocket.MessageType, m string) {
	c.t.Helper()
	if err := c.conn.Write(c.t.Context(), kind, []byte(m)); err != nil {
		c.t.Fatal(err)
	}
}

// hear reads until something was said, or the connection ends: then it gives why.
func (c *client) hear(until func() bool) error {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	defer cancel()
	for !until() {
		kind, m, err := c.conn.Read(ctx)
		if err != nil {
			if ctx.Err() != nil {
				c.t.Fatalf("heard only %q %v", c.heard.String(), c.texts)
			}
			return err
		}
		switch {
		case kind == websocket.MessageText:
			var text map[string]any
			if err := json.Unmarshal(m, &text); err != nil {
				c.t.Fatal(err)
			}
			c.texts = append(c.texts, text)
		case m[0] == 3:
			c.first = int64(binary.BigEndian.Uint64(m[1:9]))
			c.heard.Write(m[9:])
		default:
			c.kinds = append(c.kinds, m[0])
			c.heard.Write(m[1:])
		}
	}
	return nil
}

func (c *client) has(text string) func() bool {
	return func() bool { return strings.Contains(c.heard.String(), text) }
}

func TestTerminals(t *testing.T) {
	w := newWorld(t)
	id := w.terminal(t, map[string]any{"cwd": "/tmp"})
	one := w.sit(t, id, "pty=1")
	one.say(websocket.MessageText, `{"type":"resize","cols":101,"rows":33}`)
	one.say(websocket.MessageBinary, "\x00stty size; pwd; echo so$((1+1))\n")
	one.hear(one.has("so2"))
	if text := one.heard.String(); one.texts[0]["type"] != "connected" || one.texts[0]["mode"] != "pty" || one.texts[0]["session_id"] != id ||
		!strings.Contains(text, "33 101") || !strings.Contains(text, "/tmp") {
		t.Fatalf("%v %q", one.texts, text)
	}
	if a := w.ask("GET", "/pty/"+id+"/ws", nil, "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="); a.status != 409 || !strings.Contains(a.body, "ALREADY_CONNECTED") {
		t.Fatalf("a second client: %+v", a)
	}
	other := w.sit(t, id, "takeover=1")
	if err := one.hear(func() bool { return false }); websocket.CloseStatus(err) != 4001 {
		t.Fatalf("the first client: %v", err)
	}
	other.hear(other.has("so2"))
	if other.first != 0 {
		t.Fatalf("the replay begins at %d", other.first)
	}
	other.say(websocket.MessageText, `{"type":"ping"}`)
	other.hear(func() bool { return other.texts[len(other.texts)-1]["type"] == "pong" })
	var state struct {
		Running bool
		Offset  int64 `json:"output_offset"`
	}
	w.json(w.ask("GET", "/pty/"+id, nil), &state)
	if !state.Running || state.Offset < 10 {
		t.Fatalf("got %+v", state)
	}
	other.say(websocket.MessageText, `{"type":"stdin","data":"exit 5\n"}`)
	err := other.hear(func() bool { return false })
	if last := other.texts[len(other.texts)-1]; websocket.CloseStatus(err) != websocket.StatusNormalClosure || last["type"] != "exit" || last["exit_code"] != 5.0 {
		t.Fatalf("%v, %v", err, last)
	}
	late := w.sit(t, id, "since=3")
	late.hear(func() bool { return len(late.texts) == 2 })
	if late.first != 3 || late.texts[1]["type"] != "exit" {
		t.Fatalf("who comes late: %d %v", late.first, late.texts)
	}
	if a := w.ask("DELETE", "/pty/"+id, nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
}

func TestATerminalWithoutOne(t *testing.T) {
	w := newWorld(t)
	id := w.terminal(t, map[string]any{"command": "echo out; echo err >&2; cat; exit 2"})
	c := w.sit(t, id, "pty=0")
	c.hear(func() bool { return c.has("out")() && c.has("err")() })
	if !bytes.Contains(c.kinds, []byte{1}) || !bytes.Contains(c.kinds, []byte{2}) || c.texts[0]["mode"] != "pipe" {
		t.Fatalf("%v %v", c.kinds, c.texts)
	}
	c.say(websocket.MessageText, `nonsense`)
	c.hear(func() bool { return c.texts[len(c.texts)-1]["type"] == "error" })
	if a := w.ask("DELETE", "/pty/"+id, nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	c.hear(func() bool { return c.texts[len(c.texts)-1]["type"] == "exit" })
}

func TestATerminalIsJoinedByAWebSocketOnly(t *testing.T) {
	w := newWorld(t)
	id := w.terminal(t, nil)
	if a := w.ask("GET", "/pty/"+id+"/ws", nil); a.status != 426 || !strings.Contains(a.body, `"message"`) {
		t.Fatalf("got %+v", a)
	}
	if a := w.ask("GET", "/pty/"+id, nil); !strings.Contains(a.body, `"running":false`) {
		t.Fatalf("the shell has begun: %+v", a)
	}
}

package agentapi_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

// FuzzCollection: an agent that was taken over may say anything, and whoever collects from it ends all the same.
func FuzzCollection(f *testing.F) {
	say := func(build func(w *bytes.Buffer)) []byte {
		var b bytes.Buffer
		build(&b)
		return b.Bytes()
	}
	found := func(b *bytes.Buffer, path string) {
		_ = agentapi.WriteJSON(b, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventFound, Found: &agentapi.Found{Path: path, Size: 1}})
	}
	f.Add(say(func(b *bytes.Buffer) {
		found(b, "a")
		_ = agentapi.WriteFrame(b, agentapi.FrameData, []byte("x"))
		_ = agentapi.WriteFrame(b, agentapi.FrameEOF, nil)
		_ = agentapi.WriteFrame(b, agentapi.FrameEnd, []byte(`{"outcome":"ok","value":{"more":true}}`))
	}))
	f.Add(say(func(b *bytes.Buffer) {
		found(b, "a")
		_ = agentapi.WriteJSON(b, agentapi.FrameEvent, agentapi.Event{Type: agentapi.EventNotice, Message: "broke off"})
	}))
	f.Add(say(func(b *bytes.Buffer) { found(b, "a"); found(b, "b") }))
	f.Add(say(func(b *bytes.Buffer) { _ = agentapi.WriteFrame(b, agentapi.FrameEvent, []byte(`{"type":"found"}`)) }))
	f.Add(say(func(b *bytes.Buffer) { _ = agentapi.WriteFrame(b, agentapi.FrameEnd, []byte(`{"value":7}`)) }))
	f.Fuzz(func(t *testing.T, data []byte) {
		var sent bytes.Buffer
		_ = agentapi.WriteFrame(&sent, agentapi.FrameEvent, []byte(`{"type":"started"}`))
		sent.Write(data)
		c := agentapi.NewClient(func(context.Context) (net.Conn, error) { return said{r: &sent}, nil })
		files, err := c.Collect(t.Context(), agentapi.CollectParams{})
		if err != nil {
			return
		}
		defer files.Close()
		for range len(data) + 1 {
			file, content, err := files.Next()
			if err != nil {
				return
			}
			if file.Path == "" || file.Size < 0 {
				t.Fatalf("a file that is none: %+v", file)
			}
			if content != nil && len(data)%2 == 0 { // the others are skipped
				n, _ := io.Copy(io.Discard, content)
				if n > int64(len(data)) {
					t.Fatal("more bytes than were sent")
				}
			}
		}
		t.Fatal("it never ends")
	})
}

package client_test

import (
	"bytes"
	"io"
	"testing"

	"github.com/covehq/cove/client"
)

func TestFramesArriveAsTheyWereSent(t *testing.T) {
	var b bytes.Buffer
	for _, payload := range []string{"", "x", "hello"} {
		if err := client.WriteFrame(&b, client.FrameStdin, []byte(payload)); err != nil {
			t.Fatal(err)
		}
	}
	r := client.NewFrameReader(&b)
	for _, want := range []string{"", "x", "hello"} {
		kind, got, err := r.Read()
		if err != nil || kind != client.FrameStdin || string(got) != want {
			t.Errorf("%d %q %v, want %q", kind, got, err, want)
		}
	}
	if _, _, err := r.Read(); err != io.EOF {
		t.Errorf("after the last: %v", err)
	}
}

func TestAFrameOverTheLimitIsRefusedBeforeItIsSent(t *testing.T) {
	if err := client.WriteFrame(io.Discard, client.FrameStdin, make([]byte, client.MaxFrame+1)); err == nil {
		t.Error("it was sent")
	}
}

func FuzzFramesNeverTakeMoreThanTheyBring(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 2, '{', '}'})
	f.Add([]byte{2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{9, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, stream []byte) {
		r := client.NewFrameReader(bytes.NewReader(stream))
		read := 0
		for {
			_, payload, err := r.Read()
			if err != nil {
				return
			}
			if read += 8 + len(payload); read > len(stream) {
				t.Fatalf("%d bytes out of %d", read, len(stream))
			}
		}
	})
}

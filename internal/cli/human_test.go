package cli_test

import (
	"bytes"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/cli"
)

func TestTimesAndSizesAreSaidAsPeopleDo(t *testing.T) {
	now := time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC)
	for d, want := range map[time.Duration]string{
		-time.Second: "now", 0: "now", 59 * time.Second: "59s ago", 3*time.Minute + 59*time.Second: "3m ago", 47 * time.Hour: "47h ago", 49 * time.Hour: "2d ago",
	} {
		if got := cli.Ago(now.Add(-d), now); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
	if got := cli.Ago(time.Time{}, now); got != "never" {
		t.Errorf("no time is %q", got)
	}
	for d, want := range map[time.Duration]string{-time.Hour: "0s", 61 * time.Second: "1m01s", 26 * time.Hour: "26h00m", 72 * time.Hour: "3d"} {
		if got := cli.Short(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0B", 1023: "1023B", 1024: "1KiB", 4508877: "4.3MiB", 512 << 20: "512MiB", 1 << 30: "1GiB", 3 << 50: "3072TiB"} {
		if got := cli.Size(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

func TestColumnsAreAlignedByCharactersAndNothingSteersTheTerminal(t *testing.T) {
	head, rows := []string{"NAME", ">SIZE", "ABOUT"}, [][]any{{"größe", 7, "x"}, {"\x1b[2Jevil\n", 1234, "a long tail that widens nothing"}}
	want := []string{
		"NAME       SIZE  ABOUT",
		"größe         7  x",
		"\uFFFD[2Jevil\uFFFD  1234  a long tail that widens nothing",
	}
	if diff := cmp.Diff(want, cli.Lines(0, head, rows...)); diff != "" {
		t.Error(diff)
	}
	want = []string{"NAME       SIZE  ABO…", "größe         7  x", "\uFFFD[2Jevil\uFFFD  1234  a l…"}
	if diff := cmp.Diff(want, cli.Lines(21, head, rows...)); diff != "" {
		t.Errorf("in 21 columns: %s", diff)
	}
}

func TestKeysThatLeaveAShellAreHeldBackAndNeverLost(t *testing.T) {
	keys, err := cli.Keys("ctrl-p,ctrl-q")
	if err != nil || !bytes.Equal(keys, []byte{0x10, 0x11}) {
		t.Fatalf("%x, %v", keys, err)
	}
	for _, tc := range []struct {
		claim string
		typed []string // each after a moment, but for what stands together
		pause time.Duration
		want  string
		left  bool
	}{
		{"both leave", []string{"ls\r\x10\x11more"}, 0, "ls\r", true},
		{"one after the other too", []string{"a\x10", "\x11"}, 100 * time.Millisecond, "a", true},
		{"too late is typing", []string{"\x10", "\x11b"}, time.Second, "\x10\x11b", false},
		{"another key follows", []string{"\x10", "x"}, 0, "\x10x", false},
		{"the first twice", []string{"\x10\x10\x11"}, 0, "\x10", true},
		{"the second alone", []string{"\x11q"}, 0, "\x11q", false},
	} {
		synctest.Test(t, func(t *testing.T) {
			r, w := io.Pipe()
			var got bytes.Buffer
			var typing sync.WaitGroup
			typing.Go(func() {
				for _, text := range tc.typed {
					_, _ = io.WriteString(w, text) // nobody reads after the end
					time.Sleep(tc.pause)
				}
				time.Sleep(time.Minute)
				w.Close()
			})
			left := cli.Pump(&got, r, keys)
			r.Close()
			typing.Wait()
			if got.String() != tc.want || left != tc.left {
				t.Errorf("%s: passed %q, left %v; want %q, %v", tc.claim, got.String(), left, tc.want, tc.left)
			}
		})
	}
	if _, err := cli.Keys("ctrl-pq"); err == nil {
		t.Error("ctrl-pq is a key")
	}
}

func TestProgressIsToldOnlyOfWhatTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		done := cli.Working(&said, func() string { return "copying" })
		time.Sleep(900 * time.Millisecond)
		done()
		if said.Len() > 0 {
			t.Errorf("less than a second: %q", said.String())
		}
		done = cli.Working(&said, func() string { return "copying" })
		time.Sleep(12 * time.Second)
		done()
		if want := "copying (1s)\ncopying (11s)\n"; said.String() != want {
			t.Errorf("%q, want %q", said.String(), want)
		}
	})
}

func TestColoursAreForTerminalsThatWantThem(t *testing.T) {
	for _, tc := range []struct {
		noColor, term string
		want          bool
	}{{"", "xterm", true}, {"1", "xterm", false}, {"", "dumb", false}} {
		t.Setenv("NO_COLOR", tc.noColor)
		t.Setenv("TERM", tc.term)
		console := openTerminal(t)
		t.Setenv("COVE_URL", "http://127.0.0.1:1")
		cli.Main(t.Context(), []string{"ps"}, cli.Streams{In: console.tty, Out: console.tty, Err: console.tty})
		if text := console.await(t, "no answer"); strings.Contains(text, "\x1b[31m") != tc.want {
			t.Errorf("NO_COLOR=%q TERM=%s: %q", tc.noColor, tc.term, text)
		}
	}
	out, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cli.Main(t.Context(), []string{"ps"}, cli.Streams{In: out, Out: out, Err: out})
	if text, err := os.ReadFile(out.Name()); err != nil || !bytes.HasPrefix(text, []byte("cove: ")) {
		t.Errorf("a file has colours: %q, %v", text, err)
	}
}

package cli_test

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/cli"
	"github.com/covehq/cove/internal/config"
)

// console is a terminal and the person in front of it.
type console struct {
	master, tty *os.File

	mu   sync.Mutex
	seen strings.Builder
}

func openTerminal(t *testing.T) *console {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	c := &console{master: master, tty: tty}
	go func() { _, _ = io.Copy(c, master) }() // ends with the terminal
	c.resize(t, 24, 80)
	return c
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen.Write(p)
}

func (c *console) resize(t *testing.T, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(c.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
	// The terminal is not ours to control, so nobody but us tells.
	if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil {
		t.Fatal(err)
	}
}

func (c *console) key(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(c.master, text); err != nil {
		t.Fatal(err)
	}
}

// await waits until the terminal shows something, and forgets what was before.
func (c *console) await(t *testing.T, text string) string {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		seen := c.seen.String()
		if strings.Contains(seen, text) {
			c.seen.Reset()
			c.mu.Unlock()
			return seen
		}
		c.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Fatalf("the terminal does not show %q but %q", text, c.seen.String())
	return ""
}

func (c *console) mode(t *testing.T) unix.Termios {
	t.Helper()
	mode, err := unix.IoctlGetTermios(int(c.tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *mode
}

// command runs on the terminal; wait returns its exit code.
func (c *console) command(t *testing.T, args ...string) (wait func() int) {
	code := make(chan int, 1)
	go func() { code <- cli.Main(t.Context(), args, cli.Streams{In: c.tty, Out: c.tty, Err: c.tty}) }()
	return func() int {
		t.Helper()
		select {
		case n := <-code:
			return n
		case <-time.After(3 * time.Minute):
			t.Fatalf("cove %s does not end", strings.Join(args, " "))
		}
		return 0
	}
}

// serve starts a server whose sandboxes are not isolated, and makes one.
func serve(t *testing.T) *client.Sandbox {
	t.Helper()
	cfg := config.Default()
	cfg.Driver, cfg.Listen, cfg.DataDir = config.DriverInproc, "127.0.0.1:0", t.TempDir()
	s, err := app.Start(t.Context(), cfg, slog.New(slog.DiscardHandler), func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("COVE_URL", s.URL)
	t.Setenv("COVE_API_KEY", string(s.Key))
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	sb, err := c.Create(t.Context(), client.CreateRequest{Template: "base", Key: "alice"})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func TestAShellHasTheSizeOfItsTerminalAlsoWhenThatChanges(t *testing.T) {
	sb := serve(t)
	c := openTerminal(t)
	before := c.mode(t)
	wait := c.command(t, "shell", sb.ID, "--", "sh")
	c.key(t, "stty size\r")
	c.await(t, "24 80")
	c.resize(t, 40, 132)
	c.key(t, "until [ $(stty size | tr ' ' x) = 40x132 ]; do sleep 0.1; done; stty size\r") // it takes a moment to arrive
	c.await(t, "40 132")

	c.key(t, "here=still\r\x10")
	c.key(t, "\x11")
	c.await(t, "left running")
	if code := wait(); code != 0 {
		t.Errorf("left with exit code %d", code)
	}
	if c.mode(t) != before {
		t.Error("the terminal stays raw")
	}

	c = openTerminal(t) // nobody reads from it yet, unlike from that of the first command, whose process goes on
	wait = c.command(t, "shell", "--attach", sb.ID[:8])
	c.key(t, "echo $here; exit 5\r")
	c.await(t, "still\r\n")
	if code := wait(); code != 5 {
		t.Errorf("the shell's exit code 5 became %d", code)
	}
}

func TestLiveViewsAreDrawnInPlaceAndEndByQ(t *testing.T) {
	sb := serve(t)
	for _, tc := range []struct{ command, shows, begins, ends string }{
		{"top", "q quits", "\x1b[?1049h\x1b[?25l", "\x1b[?1049l\x1b[?25h"},
		{"stats", "CPU %", "\x1b[?25l", "\x1b[?25h"},
	} {
		t.Run(tc.command, func(t *testing.T) {
			c := openTerminal(t)
			before := c.mode(t)
			wait := c.command(t, tc.command, "--interval", "100ms")
			if text := c.await(t, sb.ID); !strings.HasPrefix(text, tc.begins) || !strings.Contains(text, tc.shows) {
				t.Errorf("it begins with %q", text)
			}
			c.await(t, sb.ID) // again
			c.resize(t, 24, 12)
			c.await(t, "\x1b[2J")
			c.await(t, sb.ID[:11]+"…")
			c.key(t, "q")
			c.await(t, tc.ends)
			if code := wait(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if c.mode(t) != before {
				t.Error("the terminal stays raw")
			}
		})
	}
}

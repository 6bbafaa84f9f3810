package agent

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// chunk is room for one frame of a stream: header and payload, so that it leaves with one write.
type chunk [agentapi.HeaderSize + agentapi.ChunkSize]byte

// chunks lends buffers for as long as bytes are in flight; the collector takes those that nobody uses.
var chunks = sync.Pool{New: func() any { return new(chunk) }}

// link is one connection with one operation. One goroutine reads it; any may write.
type link struct {
	conn net.Conn
	in   *agentapi.Reader
	talk *os.File // of OpBranch: what the kernel is given; else nil

	mu    sync.Mutex // held for one frame
	ended bool       // End was sent, or the peer is gone
}

func newLink(conn net.Conn) *link {
	return &link{conn: conn, in: agentapi.NewReader(bufio.NewReaderSize(conn, 4<<10))}
}

// chunk sends the first n payload bytes of b.
func (l *link) chunk(kind agentapi.FrameKind, b *chunk, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return net.ErrClosed
	}
	agentapi.PutHeader(b[:], kind, n)
	_, err := l.conn.Write(b[:agentapi.HeaderSize+n])
	return err
}

func (l *link) event(e agentapi.Event) error {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	payload, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return l.frame(agentapi.FrameEvent, payload)
}

func (l *link) frame(kind agentapi.FrameKind, payload []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return net.ErrClosed
	}
	return agentapi.WriteFrame(l.conn, kind, payload)
}

// end says the last word and lets the reading goroutine go.
func (l *link) end(e agentapi.End) {
	payload, err := json.Marshal(e)
	if err != nil || len(payload) > agentapi.MaxPayload {
		payload, _ = json.Marshal(refusal(fault.New(fault.Exhausted, "the answer is larger than %d bytes", agentapi.MaxPayload)))
	}
	l.mu.Lock()
	if !l.ended {
		l.ended = true
		_ = agentapi.WriteFrame(l.conn, agentapi.FrameEnd, payload) // a client that left hears no end
	}
	l.mu.Unlock()
	l.hangup()
}

// hangup ends the connection in a way that leaves what was sent readable: closing a TCP socket that holds unread bytes
// would reset it and lose the End.
func (l *link) hangup() {
	if tcp, ok := l.conn.(*net.TCPConn); ok {
		tcp.CloseWrite()
		tcp.SetReadDeadline(time.Now().Add(time.Second))
		return
	}
	l.conn.Close()
}

// linger reads what a TCP peer still sends until it has seen the End, then closes.
func (l *link) linger() {
	if tcp, ok := l.conn.(*net.TCPConn); ok && l.over() {
		tcp.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.Copy(io.Discard, tcp) // until the peer hangs up or the second has passed
	}
	l.close()
}

func (l *link) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

// close drops the connection; a write that is under way fails.
func (l *link) close() { l.conn.Close() }

func (l *link) answer(value any) error {
	end := agentapi.End{Outcome: agentapi.OutcomeOK}
	if _, empty := value.(none); !empty {
		raw, err := json.Marshal(value)
		if err != nil {
			return err
		}
		end.Value = raw
	}
	l.end(end)
	return nil
}

func (l *link) refuse(err error) { l.end(refusal(err)) }

func refusal(err error) agentapi.End {
	return agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.KindOf(err), Message: fault.Message(err)}}
}

// left waits, in a goroutine of its own, until the client leaves; the caller closes the link to end it.
func (l *link) left(a *Agent) <-chan struct{} {
	gone := make(chan struct{})
	if !a.spawn(func() {
		defer close(gone)
		for {
			if _, err := l.in.Read(); err != nil {
				return
			}
		}
	}) {
		close(gone)
	}
	return gone
}

// readChunk waits until f has bytes, and only then takes a buffer for them. The buffer is the caller's to put back.
func readChunk(raw syscall.RawConn) (b *chunk, n int, err error) {
	werr := raw.Read(func(fd uintptr) bool {
		b, n, err = tryChunk(int(fd))
		return err != syscall.EAGAIN
	})
	if werr != nil {
		return nil, 0, werr
	}
	return b, n, err
}

// tryChunk reads what is there now; EAGAIN when nothing is, io.EOF at the end.
func tryChunk(fd int) (*chunk, int, error) {
	b := chunks.Get().(*chunk)
	n, err := retry(func() (int, error) { return syscall.Read(fd, b[agentapi.HeaderSize:]) })
	if n > 0 {
		return b, n, nil
	}
	chunks.Put(b)
	if err == nil || err == syscall.EIO { // EIO: the last holder of a terminal's other side is gone
		err = io.EOF
	}
	return nil, 0, err
}

// retry repeats a system call that a signal interrupted.
func retry[T any](call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err != syscall.EINTR {
			return v, err
		}
	}
}

package agentapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Dialer opens a connection to one agent; a driver's Dial with the sandbox's id filled in.
type Dialer func(ctx context.Context) (net.Conn, error)

// Client speaks to one agent. It holds no connection: each call dials its own.
type Client struct{ dial Dialer }

// NewClient returns a client that reaches its agent by dial.
func NewClient(dial Dialer) *Client { return &Client{dial: dial} }

// Hello asks the agent what it is.
func (c *Client) Hello(ctx context.Context) (Hello, error) { return ask[Hello](ctx, c, OpHello, nil) }

// Exec starts a process and streams what it tells; it returns once the process has begun.
func (c *Client) Exec(ctx context.Context, p ExecParams) (*Stream, error) {
	return c.stream(ctx, OpExec, p)
}

// Attach joins the output of a process started earlier.
func (c *Client) Attach(ctx context.Context, p AttachParams) (*Stream, error) {
	return c.stream(ctx, OpAttach, p)
}

// Run runs one cell; it returns once the cell has begun. A fault of kind Gone means that the kernel must be replaced.
func (c *Client) Run(ctx context.Context, p RunParams) (*Stream, error) {
	return c.stream(ctx, OpRun, p)
}

// Watch streams changes under a directory until the caller leaves.
func (c *Client) Watch(ctx context.Context, p WatchParams) (*Stream, error) {
	return c.stream(ctx, OpWatch, p)
}

// Processes lists what the agent has started and still runs; each has a command.
func (c *Client) Processes(ctx context.Context) ([]Process, error) {
	list, err := ask[[]Process](ctx, c, OpProcesses, nil)
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		if len(p.Argv) == 0 {
			return nil, fault.Wrap(fault.Internal, &ProtocolError{"a process without a command"}, "the agent does not speak this protocol")
		}
	}
	return list, nil
}

// Signal sends a signal to a process.
func (c *Client) Signal(ctx context.Context, p SignalParams) error {
	return c.call(ctx, OpSignal, p, nil)
}

// Resize changes a terminal's size.
func (c *Client) Resize(ctx context.Context, p ResizeParams) error {
	return c.call(ctx, OpResize, p, nil)
}

// Stdin copies r into a process's stdin.
func (c *Client) Stdin(ctx context.Context, p StdinParams, r io.Reader) error {
	return c.send(ctx, OpStdin, p, FrameStdin, r, nil)
}

// Kernels lists the kernels, dead ones included until they are replaced.
func (c *Client) Kernels(ctx context.Context) ([]Kernel, error) {
	return ask[[]Kernel](ctx, c, OpKernels, nil)
}

// KernelStart starts a kernel by exec and does not wait until it is ready.
func (c *Client) KernelStart(ctx context.Context, p KernelStartParams) (Kernel, error) {
	return ask[Kernel](ctx, c, OpKernelStart, p)
}

// KernelWait returns when a kernel takes cells or has died.
func (c *Client) KernelWait(ctx context.Context, p KernelParams) (Kernel, error) {
	return ask[Kernel](ctx, c, OpKernelWait, p)
}

// Branch has a copy made of a kernel and returns when it stands; the kernel takes no cell until release and has taken
// none for as long as Branched says. The connection must have been opened with a MessageBranch.
func (c *Client) Branch(ctx context.Context, p BranchParams) (b Branched, release func(), err error) {
	l, err := c.open(ctx, OpBranch, p)
	if err != nil {
		return b, nil, err
	}
	e, err := l.event()
	if err == nil && e.Type != EventBranch {
		err = l.fault(&ProtocolError{"a branch began with " + string(e.Type)})
	}
	if err != nil {
		l.close()
		return b, nil, err
	}
	return Branched{Stalled: time.Duration(e.Count) * time.Microsecond, Others: e.Lost}, l.close, nil
}

// Branched is what an agent tells of a copy.
type Branched struct {
	Stalled time.Duration // how long the kernel had been held when the copy stood
	Others  []Lost        // other kernels and processes of the sandbox
}

// KernelStop kills a kernel with its children.
func (c *Client) KernelStop(ctx context.Context, p KernelParams) error {
	return c.call(ctx, OpKernelStop, p, nil)
}

// Interrupt sends SIGINT to the running cell.
func (c *Client) Interrupt(ctx context.Context, p KernelParams) error {
	return c.call(ctx, OpInterrupt, p, nil)
}

// Stat describes a path; a symbolic link is not followed.
func (c *Client) Stat(ctx context.Context, p PathParams) (Entry, error) {
	return ask[Entry](ctx, c, OpStat, p)
}

// List lists a directory.
func (c *Client) List(ctx context.Context, p ListParams) ([]Entry, error) {
	return ask[[]Entry](ctx, c, OpList, p)
}

// Read opens a file; the reader ends with an error if the file could not be read to its end.
func (c *Client) Read(ctx context.Context, p ReadParams) (Entry, io.ReadCloser, error) {
	l, err := c.open(ctx, OpRead, p)
	if err != nil {
		return Entry{}, nil, err
	}
	e, err := l.started()
	if err != nil {
		l.close()
		return Entry{}, nil, err
	}
	if e.Entry == nil {
		l.close()
		return Entry{}, nil, l.fault(&ProtocolError{"read began without an entry"})
	}
	return *e.Entry, &dataReader{link: l}, nil
}

// Write makes a file of what r holds. When r fails, nothing appears.
func (c *Client) Write(ctx context.Context, p WriteParams, r io.Reader) (Entry, error) {
	var e Entry
	err := c.send(ctx, OpWrite, p, FrameData, r, &e)
	return e, err
}

// Mkdir makes a directory.
func (c *Client) Mkdir(ctx context.Context, p MkdirParams) (Entry, error) {
	return ask[Entry](ctx, c, OpMkdir, p)
}

// Move renames a path.
func (c *Client) Move(ctx context.Context, p MoveParams) (Entry, error) {
	return ask[Entry](ctx, c, OpMove, p)
}

// Remove removes a path.
func (c *Client) Remove(ctx context.Context, p RemoveParams) error {
	return c.call(ctx, OpRemove, p, nil)
}

// Chmod changes permissions or owner.
func (c *Client) Chmod(ctx context.Context, p ChmodParams) (Entry, error) {
	return ask[Entry](ctx, c, OpChmod, p)
}

// Metrics tells what the agent sees from inside.
func (c *Client) Metrics(ctx context.Context) (Metrics, error) {
	return ask[Metrics](ctx, c, OpMetrics, nil)
}

// Account tells who a user of the sandbox is; one that there is not is fault.NotFound.
func (c *Client) Account(ctx context.Context, p AccountParams) (Account, error) {
	return ask[Account](ctx, c, OpAccount, p)
}

// Listen has the agent take connections on a port of the sandbox's loopback, unless somebody does already.
func (c *Client) Listen(ctx context.Context, p ListenParams) error {
	return c.call(ctx, OpListen, p, nil)
}

// DialPort connects to a port inside the sandbox. The connection outlives ctx, which bounds only the dialing.
func (c *Client) DialPort(ctx context.Context, p DialParams) (*PortConn, error) {
	l, err := c.open(ctx, OpDial, p)
	if err != nil {
		return nil, err
	}
	if _, err := l.started(); err != nil {
		l.close()
		return nil, err
	}
	if !l.stop() {
		l.close()
		return nil, l.fault(context.Cause(ctx))
	}
	l.ctx = context.Background() // the connection now belongs to the caller, who closes it
	return &PortConn{dataReader{link: l}}, nil
}

func ask[T any](ctx context.Context, c *Client, op Op, params any) (value T, err error) {
	err = c.call(ctx, op, params, &value)
	return value, err
}

// call sends a request and takes the answer from its End.
func (c *Client) call(ctx context.Context, op Op, params, value any) error {
	l, err := c.open(ctx, op, params)
	if err != nil {
		return err
	}
	defer l.close()
	return l.answer(value)
}

// send streams r after the request, then takes the answer.
func (c *Client) send(ctx context.Context, op Op, params any, kind FrameKind, r io.Reader, value any) error {
	l, err := c.open(ctx, op, params)
	if err != nil {
		return err
	}
	defer l.close()
	buf := make([]byte, HeaderSize+ChunkSize)
	for {
		n, err := r.Read(buf[HeaderSize:])
		if n > 0 {
			PutHeader(buf, kind, n)
			if _, werr := l.conn.Write(buf[:HeaderSize+n]); werr != nil {
				// The agent may have refused halfway; its reason waits to be read.
				if aerr := l.answer(value); aerr != nil {
					return aerr
				}
				return l.fault(werr)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := l.write(FrameEOF, nil); err != nil {
		if aerr := l.answer(value); aerr != nil {
			return aerr
		}
		return err
	}
	return l.answer(value)
}

func (c *Client) stream(ctx context.Context, op Op, params any) (*Stream, error) {
	l, err := c.open(ctx, op, params)
	if err != nil {
		return nil, err
	}
	l.asked = true
	first, err := l.event()
	if err != nil {
		l.close()
		return nil, err
	}
	return &Stream{link: l, first: &first}, nil
}

// link is one connection with one operation on it.
type link struct {
	ctx  context.Context // of the call that this link is; it lives no longer
	conn net.Conn
	buf  *bufio.Reader
	r    *Reader
	stop func() bool
	left int       // bytes of output that are still to come of the frame that was begun
	kind FrameKind // of that frame
	// asked is set once the agent may have begun, before anybody else knows of the link.
	asked bool

	mu sync.Mutex // held for one frame, so that frames of several goroutines do not mix
}

func (c *Client) open(ctx context.Context, op Op, params any) (*link, error) {
	req := Request{Op: op}
	if params != nil {
		raw, err := json.Marshal(params)
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "parameters of %s cannot be encoded", op)
		}
		req.Params = raw
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	l := &link{ctx: ctx, conn: conn, buf: bufio.NewReaderSize(conn, 1<<10)}
	l.r = NewReader(l.buf)
	l.stop = context.AfterFunc(ctx, func() { conn.Close() })
	if err := WriteJSON(conn, FrameRequest, req); err != nil {
		l.close()
		return nil, l.fault(err)
	}
	return l, nil
}

func (l *link) close() {
	l.stop()
	l.conn.Close()
}

func (l *link) write(kind FrameKind, payload []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := WriteFrame(l.conn, kind, payload); err != nil {
		return l.fault(err)
	}
	return nil
}

// OutputSize is how much output one event holds at most. An event waits in memory, encoded too, for as long as its reader
// is slow, so it holds less than a frame.
const OutputSize = 8 << 10

// event reads the next thing the agent tells; a refusal is an error.
func (l *link) event() (Event, error) {
	if l.left > 0 {
		return l.output()
	}
	header, err := l.buf.Peek(HeaderSize)
	if err != nil {
		return Event{}, l.fault(err)
	}
	kind, n, err := ParseHeader(header)
	if err != nil {
		return Event{}, l.fault(err)
	}
	if kind == FrameStdout || kind == FrameStderr {
		_, _ = l.buf.Discard(HeaderSize) // it was peeked, so it is there
		l.kind, l.left = kind, n
		return l.output()
	}
	f, err := l.r.Read()
	if err != nil {
		return Event{}, l.fault(err)
	}
	defer l.r.forget()
	return l.decode(f)
}

// output reads the next part of a frame of output.
func (l *link) output() (Event, error) {
	e := Event{Type: EventStdout, Time: time.Now(), Data: make([]byte, min(l.left, OutputSize))}
	if l.kind == FrameStderr {
		e.Type = EventStderr
	}
	if _, err := io.ReadFull(l.buf, e.Data); err != nil {
		return Event{}, l.fault(err)
	}
	l.left -= len(e.Data)
	return e, nil
}

// decode is the event of a frame that is not output.
func (l *link) decode(f Frame) (Event, error) {
	switch f.Kind {
	case FrameEvent:
		var e Event
		if err := json.Unmarshal(f.Payload, &e); err != nil {
			return Event{}, l.fault(&ProtocolError{"event: " + err.Error()})
		}
		if !e.whole() {
			return Event{}, l.fault(&ProtocolError{"event without its content, or an end that is no end frame"})
		}
		return e, nil
	case FrameEnd:
		end, err := l.end(f.Payload)
		if err != nil {
			return Event{}, err
		}
		return Event{Type: EventEnd, Time: time.Now(), End: end}, nil
	default:
		return Event{}, l.fault(&ProtocolError{"unexpected frame"})
	}
}

// whole says whether an event has what its type promises: whoever hears it follows the pointer, and code that took the
// agent over must not end the server by leaving it out. An end has a frame of its own, in which a refusal is seen.
func (e *Event) whole() bool {
	switch e.Type {
	case EventResult:
		return e.Result != nil
	case EventError:
		return e.Error != nil
	case EventFile:
		return e.File != nil
	case EventEnd:
		return false
	default: // the others hold values only, or what its reader checks
		return true
	}
}

// started reads the event that begins an operation of data frames.
func (l *link) started() (Event, error) {
	e, err := l.event()
	if err == nil && e.Type != EventStarted {
		err = l.fault(&ProtocolError{"operation did not begin"})
	}
	return e, err
}

// answer reads up to the End and decodes its value.
func (l *link) answer(value any) error {
	for {
		e, err := l.event()
		if err != nil {
			return err
		}
		if e.Type != EventEnd {
			continue
		}
		if value == nil || len(e.End.Value) == 0 {
			return nil
		}
		if err := json.Unmarshal(e.End.Value, value); err != nil {
			return l.fault(&ProtocolError{"answer: " + err.Error()})
		}
		return nil
	}
}

func (l *link) end(payload []byte) (*End, error) {
	var end End
	if err := json.Unmarshal(payload, &end); err != nil {
		return nil, l.fault(&ProtocolError{"end: " + err.Error()})
	}
	if end.Outcome != OutcomeRefused {
		return &end, nil
	}
	if end.Fault == nil {
		return nil, fault.New(fault.Internal, "the agent refused without a reason")
	}
	return nil, &fault.Error{Kind: end.Fault.Kind, Message: end.Fault.Message}
}

// fault says why a connection failed in words that a caller can act on.
func (l *link) fault(err error) error {
	var protocol *ProtocolError
	switch cause := context.Cause(l.ctx); {
	case errors.Is(cause, context.DeadlineExceeded):
		return fault.Wrap(fault.Timeout, cause, "the sandbox did not answer in the time given")
	case cause != nil:
		return cause
	case errors.As(err, &protocol):
		return fault.Wrap(fault.Internal, l.cut(err), "the agent does not speak this protocol")
	default:
		return fault.Wrap(fault.Unavailable, l.cut(err), "the connection to the sandbox broke")
	}
}

// ErrCut is in the error of a run of which nobody knows how far it came: it may have begun, and ended. Whoever starts it again may run it twice.
var ErrCut = errors.New("the run may have begun")

func (l *link) cut(err error) error {
	if !l.asked {
		return err
	}
	return fmt.Errorf("%w: %w", ErrCut, err)
}

// Stream is a running operation. Events may be read by one goroutine while others send.
type Stream struct {
	link    *link
	first   *Event
	onEvent func(*Event)
	onEnd   func(End)
	onClose func()
}

// OnEvent calls f with each event just before Events yields it, for whoever hands the stream on and wants to count. It is
// set before Events is read.
func (s *Stream) OnEvent(f func(*Event)) { s.onEvent = f }

// OnEnd calls f with the run's end just before Events yields it, for whoever hands the stream on and wants to know; there
// may be several. It is set before Events is read.
func (s *Stream) OnEnd(f func(End)) {
	if first := s.onEnd; first != nil {
		s.onEnd = func(end End) { first(end); f(end) }
		return
	}
	s.onEnd = f
}

// OnClose calls f whenever the stream is closed, which may be more than once. It is set before the stream is handed on.
func (s *Stream) OnClose(f func()) { s.onClose = f }

// Events yields what the run tells, EventEnd last. Leaving the loop closes the connection.
func (s *Stream) Events() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		defer s.Close()
		if s.first != nil {
			e := *s.first
			s.first = nil
			s.tell(&e)
			if !yield(e, nil) || e.Type == EventEnd {
				return
			}
		}
		for {
			e, err := s.link.event()
			s.tell(&e)
			last := err != nil || e.Type == EventEnd // asked here, so that a slow reader does not hold the event twice
			if !yield(e, err) || last {
				return
			}
		}
	}
}

// tell is for those who watch.
func (s *Stream) tell(e *Event) {
	if s.onEvent != nil {
		s.onEvent(e)
	}
	if s.onEnd != nil && e.Type == EventEnd && e.End != nil {
		s.onEnd(*e.End)
	}
}

// Stdin sends bytes to the process's stdin.
func (s *Stream) Stdin(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), ChunkSize)
		if err := s.link.write(FrameStdin, p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// CloseStdin ends the process's stdin.
func (s *Stream) CloseStdin() error { return s.link.write(FrameEOF, nil) }

// Control acts on the run: a signal, a new terminal size, an interrupt.
func (s *Stream) Control(c Control) error {
	payload, err := json.Marshal(c)
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "control cannot be encoded")
	}
	return s.link.write(FrameControl, payload)
}

// Close leaves the run; what that does to it was said when it started.
func (s *Stream) Close() error {
	s.link.close()
	if s.onClose != nil {
		s.onClose()
	}
	return nil
}

// dataReader reads the bytes of Data frames straight into the caller's buffer. It keeps its place in a frame when a
// deadline passes, so a connection survives one.
type dataReader struct {
	link *link
	left int // of the current frame
	err  error
}

func (d *dataReader) Read(p []byte) (int, error) {
	for d.left == 0 && d.err == nil {
		if err := d.next(); err != nil {
			return 0, err
		}
	}
	if d.left == 0 {
		return 0, d.err
	}
	n, err := d.link.buf.Read(p[:min(len(p), d.left)])
	d.left -= n
	if err != nil && n == 0 {
		return 0, d.broken(err)
	}
	return n, nil
}

// next reads frame headers up to the next bytes or the end of them.
func (d *dataReader) next() error {
	header, err := d.link.buf.Peek(HeaderSize)
	if err != nil {
		return d.broken(err)
	}
	kind, n, err := ParseHeader(header)
	if err != nil {
		d.err = d.link.fault(err)
		return nil
	}
	switch kind {
	case FrameData:
		_, _ = d.link.buf.Discard(HeaderSize) // it was peeked, so it is there
		d.left = n
	case FrameEOF:
		_, _ = d.link.buf.Discard(HeaderSize) // it was peeked, so it is there
		d.err = io.EOF
	case FrameEnd:
		_, err := d.link.event()
		if err == nil {
			err = io.EOF
		}
		d.err = err
	default:
		d.err = d.link.fault(&ProtocolError{"unexpected frame among data"})
	}
	return nil
}

func (d *dataReader) broken(err error) error {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return err
	}
	d.err = d.link.fault(err)
	return d.err
}

func (d *dataReader) Close() error {
	d.link.close()
	return nil
}

// PortConn is a connection to a port inside the sandbox, as a net.Conn with half close.
type PortConn struct{ dataReader }

// Write sends bytes to the port.
func (c *PortConn) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		n := min(len(p)-sent, ChunkSize)
		if err := c.link.write(FrameData, p[sent:sent+n]); err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

// CloseWrite says that no more bytes come; reading goes on.
func (c *PortConn) CloseWrite() error { return c.link.write(FrameEOF, nil) }

// LocalAddr is that of the connection to the agent.
func (c *PortConn) LocalAddr() net.Addr { return c.link.conn.LocalAddr() }

// RemoteAddr is that of the connection to the agent.
func (c *PortConn) RemoteAddr() net.Addr { return c.link.conn.RemoteAddr() }

// SetDeadline bounds reads and writes. A write that a deadline cut off leaves the connection unusable.
func (c *PortConn) SetDeadline(t time.Time) error { return c.link.conn.SetDeadline(t) }

// SetReadDeadline bounds reads.
func (c *PortConn) SetReadDeadline(t time.Time) error { return c.link.conn.SetReadDeadline(t) }

// SetWriteDeadline bounds writes.
func (c *PortConn) SetWriteDeadline(t time.Time) error { return c.link.conn.SetWriteDeadline(t) }

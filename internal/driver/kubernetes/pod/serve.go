package pod

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	// maxGreetings bounds connections whose owner is not known yet: code in the sandbox can open any number of them.
	maxGreetings = 64
	greetFor     = 10 * time.Second
	// orderFor bounds one order; the longest waits for a kernel by exec.
	orderFor = 2 * time.Minute
)

// server is the Pod's program. What it becomes is in life.
type server struct {
	settings podapi.Settings
	token    []byte
	tls      *tls.Config
	slots    chan struct{}
	exit     func(int)
	zygote   *zygote // nil: the template has none

	mu    sync.Mutex
	spare *newborn // a kernel that waits for a sandbox
	life  *life
}

// accept serves until the listener fails.
func (s *server) accept(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var transient net.Error
			if errors.As(err, &transient) && transient.Timeout() || isShortage(err) {
				<-time.After(50 * time.Millisecond) // code in the sandbox has taken all descriptors; it may let go of some
				continue
			}
			return err
		}
		select {
		case s.slots <- struct{}{}:
			go s.greet(conn)
		default:
			conn.Close()
		}
	}
}

// mourn ends a Pod whose zygote died before it became a sandbox: a fresh one is better than one that is slow.
func (s *server) mourn() {
	<-s.zygote.gone
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life == nil {
		s.exit(podapi.ExitFailed)
	}
}

// greet finds out who came and what for.
func (s *server) greet(raw net.Conn) {
	held := true
	release := func() {
		if held {
			held = false
			<-s.slots
		}
	}
	defer release()
	conn := tls.Server(raw, s.tls)
	purpose, err := s.meet(conn)
	if err != nil {
		raw.Close()
		return
	}
	release()
	gentle := &gentleConn{Conn: conn, raw: raw}
	switch purpose {
	case podapi.ForAgent:
		s.operate(gentle)
	case podapi.ForControl:
		s.obey(gentle)
	default:
		raw.Close()
	}
}

func (s *server) meet(conn *tls.Conn) (purpose byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), greetFor) // of this greeting alone
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		return 0, err
	}
	if err := conn.SetDeadline(time.Now().Add(greetFor)); err != nil {
		return 0, err
	}
	if err := podapi.Prove(conn, s.token); err != nil {
		return 0, err
	}
	var b [1]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return 0, err
	}
	return b[0], conn.SetDeadline(time.Time{})
}

// operate hands a connection to the agent.
func (s *server) operate(conn net.Conn) {
	a := s.agent()
	if a == nil {
		refuse(conn, fault.New(fault.Conflict, "this Pod is not a sandbox yet"))
		conn.Close()
		return
	}
	a.HandleConn(conn)
}

// obey carries out one order.
func (s *server) obey(conn net.Conn) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), orderFor) // of this order: whoever sent it may have left
	defer cancel()
	_ = conn.SetReadDeadline(time.Now().Add(greetFor))
	f, err := agentapi.NewReader(bufio.NewReader(conn)).Read()
	if err != nil {
		return
	}
	var o podapi.Order
	if f.Kind != agentapi.FrameRequest || json.Unmarshal(f.Payload, &o) != nil {
		refuse(conn, fault.New(fault.Invalid, "that is not an order"))
		return
	}
	value, err := s.do(ctx, o)
	if err != nil {
		refuse(conn, err)
		return
	}
	raw, err := json.Marshal(value)
	if err != nil {
		refuse(conn, err)
		return
	}
	// Whoever has left hears nothing, and asks again.
	_ = agentapi.WriteJSON(conn, agentapi.FrameEnd, agentapi.End{Outcome: agentapi.OutcomeOK, Value: raw})
}

func (s *server) do(ctx context.Context, o podapi.Order) (any, error) {
	switch o.Op {
	case podapi.OpBoot:
		return s.boot(ctx, o)
	case podapi.OpKernel:
		return struct{}{}, s.kernel(ctx, o.Kernel)
	case podapi.OpDeadline:
		return struct{}{}, s.deadline(o.Left)
	case podapi.OpUsage:
		return usage(cgroupDir), nil
	case podapi.OpStatus:
		return s.status(), nil
	case podapi.OpEnd:
		s.exit(podapi.ExitEnded)
		return struct{}{}, nil
	}
	return nil, fault.New(fault.Unsupported, "this Pod does not know the order %q", o.Op)
}

func refuse(conn net.Conn, err error) {
	// Whoever has left needs no answer.
	_ = agentapi.WriteJSON(conn, agentapi.FrameEnd, agentapi.End{
		Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.KindOf(err), Message: fault.Message(err)},
	})
}

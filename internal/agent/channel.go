package agent

import (
	"errors"
	"io"
	"net"
	"os"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// ServeChannel serves the first channel, which belongs to whoever made the sandbox, until it closes.
func (a *Agent) ServeChannel(ch *net.UnixConn) error { return a.serveChannel(ch, true) }

func (a *Agent) serveChannel(ch *net.UnixConn, first bool) error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		ch.Close()
		return fault.New(fault.Unavailable, "the sandbox is ending")
	}
	a.channels[ch] = struct{}{}
	a.mu.Unlock()
	defer func() {
		ch.Close()
		a.mu.Lock()
		delete(a.channels, ch)
		a.mu.Unlock()
	}()
	for {
		m, fds, err := agentapi.ReceiveMessage(ch)
		var protocol *agentapi.ProtocolError
		switch {
		case err == nil:
			a.message(m, fds, first)
		case err == io.EOF:
			return nil
		case errors.As(err, &protocol) && first:
			// A defect of the maker's, not a reason to end the sandbox: the message is dropped.
		default:
			return err
		}
	}
}

// message acts on one message. A further channel may only bring connections.
func (a *Agent) message(m agentapi.Message, fds []int, first bool) {
	if !first && m.Type != agentapi.MessageConn && m.Type != agentapi.MessageBranch {
		agentapi.CloseDescriptors(fds)
		return
	}
	switch m.Type {
	case agentapi.MessageConn:
		conn, err := agentapi.DescriptorConn(fds[0])
		if err != nil {
			return
		}
		if !a.spawn(func() { a.HandleConn(conn) }) {
			conn.Close()
		}
	case agentapi.MessageBranch:
		conn, err := agentapi.DescriptorConn(fds[0])
		if err != nil {
			agentapi.CloseDescriptors(fds[1:])
			return
		}
		talk := os.NewFile(uintptr(fds[1]), "talk")
		if !a.spawn(func() { a.handle(conn, talk) }) {
			conn.Close()
			talk.Close()
		}
	case agentapi.MessageChannel:
		ch, err := agentapi.Channel(fds[0])
		if err != nil {
			return
		}
		// However it ends, only its own connections are no longer brought.
		if !a.spawn(func() { _ = a.serveChannel(ch, false) }) {
			ch.Close()
		}
	case agentapi.MessageKernel:
		// Whoever sent it asks by OpKernelWait what became of it.
		_ = a.Adopt(*m.Kernel, fds)
	case agentapi.MessageExit:
		a.Exited(*m.Exit)
	case agentapi.MessageOOM:
		a.memory.hear(m.Text)
	case agentapi.MessageBoot:
		// Main has taken what it says of the sandbox. The rest is as if it had come by itself.
		if m.Kernel != nil {
			a.message(agentapi.Message{Type: agentapi.MessageKernel, Kernel: m.Kernel}, fds[:agentapi.KernelDescriptors], first)
			fds = fds[agentapi.KernelDescriptors:]
		}
		if m.Channel {
			a.message(agentapi.Message{Type: agentapi.MessageChannel}, fds, first)
		}
	}
}

package agent

import (
	"encoding/json"
	"net"
	"slices"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
)

// rehearse does for nobody what the first callers will wait for: a kernel comes, is asked for and runs a cell. Afterwards
// the pages of the program that this takes are there, and JSON has met the types. It is given up as soon as somebody waits:
// then there is nobody to win time for. Nothing of it is left but memory.
func rehearse(waits func() bool) {
	if waits() {
		return
	}
	a, err := New(Config{})
	if err != nil {
		return
	}
	defer a.Close()
	s := stage{agent: a}
	defer s.clear()
	if s.build() != nil {
		return
	}
	for _, act := range []func() error{s.adopt, s.wait, s.run} {
		if waits() || act() != nil {
			return
		}
	}
}

// stage has what a rehearsal needs: a channel to the agent, and the kernel's side of what joins a kernel to it.
type stage struct {
	agent  *Agent
	maker  *net.UnixConn
	kernel net.Conn
	rest   []int // descriptors to close
}

func (s *stage) build() error {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ours, err := agentapi.Channel(pair[0])
	if err != nil {
		syscall.Close(pair[1])
		return err
	}
	s.maker = ours
	theirs, err := agentapi.Channel(pair[1])
	if err != nil {
		return err
	}
	s.agent.spawn(func() { _ = s.agent.serveChannel(theirs, true) }) // until clear closes the other end
	return nil
}

const rehearsalToken = "rehearsal"

// adopt hands the agent a kernel that is no process: what stands in for its pidfd is never readable, and no signal reaches it.
func (s *stage) adopt() error {
	e, err := openEnds()
	if err != nil {
		return err
	}
	s.rest = slices.Concat(e.theirs[:3], e.ours)
	var pipe [2]int
	if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC); err != nil {
		syscall.Close(e.theirs[3])
		return err
	}
	s.rest = append(s.rest, pipe[:]...)
	if s.kernel, err = agentapi.DescriptorConn(e.theirs[3]); err != nil {
		return err
	}
	boot := agentapi.Message{
		Type: agentapi.MessageBoot, Boot: &agentapi.Boot{Env: map[string]string{"LANG": "C.UTF-8"}},
		Kernel: &agentapi.Adoption{Name: agentapi.DefaultKernel, Token: rehearsalToken},
	}
	return agentapi.SendMessage(s.maker, boot, append(e.ours, pipe[0])...)
}

// wait asks for the kernel, as a driver does, while the kernel says that it is ready.
func (s *stage) wait() error {
	if err := s.tell(agentapi.Event{Type: agentapi.EventReady, PID: 1, Message: "ipython"}); err != nil {
		return err
	}
	return s.ask(agentapi.OpKernelWait, agentapi.KernelParams{Kernel: agentapi.DefaultKernel, Token: rehearsalToken}, nil)
}

// run is a cell with a value.
func (s *stage) run() error {
	return s.ask(agentapi.OpRun, agentapi.RunParams{Code: "1+1"}, func() error {
		if _, err := agentapi.NewReader(s.kernel).Read(); err != nil {
			return err
		}
		result := &agentapi.Result{Data: map[string]json.RawMessage{"text/plain": json.RawMessage(`"2"`)}}
		for _, e := range []agentapi.Event{
			{Type: agentapi.EventStarted, Count: 1}, {Type: agentapi.EventResult, Result: result},
			{Type: agentapi.EventEnd, End: &agentapi.End{Outcome: agentapi.OutcomeOK}},
		} {
			if err := s.tell(e); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *stage) tell(e agentapi.Event) error {
	return agentapi.WriteJSON(s.kernel, agentapi.FrameEvent, e)
}

// ask has one operation done, and meanwhile.
func (s *stage) ask(op agentapi.Op, params any, meanwhile func() error) error {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = agentapi.SendMessage(s.maker, agentapi.Message{Type: agentapi.MessageConn}, pair[1])
	syscall.Close(pair[1])
	conn, connErr := agentapi.DescriptorConn(pair[0])
	if connErr != nil {
		return connErr
	}
	defer conn.Close()
	if err != nil {
		return err
	}
	raw, err := json.Marshal(params)
	if err != nil {
		return err
	}
	if err := agentapi.WriteJSON(conn, agentapi.FrameRequest, agentapi.Request{Op: op, Params: raw}); err != nil {
		return err
	}
	if meanwhile != nil {
		if err := meanwhile(); err != nil {
			return err
		}
	}
	for in := agentapi.NewReader(conn); ; {
		f, err := in.Read()
		if err != nil || f.Kind == agentapi.FrameEnd {
			return err
		}
	}
}

// clear ends the kernel and the channel.
func (s *stage) clear() {
	if s.maker != nil {
		exit := agentapi.Message{Type: agentapi.MessageExit, Exit: &agentapi.KernelExit{Token: rehearsalToken}}
		_ = agentapi.SendMessage(s.maker, exit) // a kernel that never came needs none
	}
	if s.kernel != nil {
		s.kernel.Close()
		if k, err := s.agent.kernel(agentapi.DefaultKernel); err == nil {
			<-k.done
		}
	}
	if s.maker != nil {
		s.maker.Close()
	}
	agentapi.CloseDescriptors(s.rest)
}

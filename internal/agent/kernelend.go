package agent

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// die says why a kernel ended, to its run and to those who wait, and lets go of it.
func (k *kernel) die(why error) {
	exit, known := k.awaitExit(why)
	k.askWhy(&exit, known, why)
	outcome, message := k.obituary(why, exit, known)
	message += k.lastWords()

	k.mu.Lock()
	k.info.State, k.info.Message = agentapi.KernelDead, message
	queue := k.queue
	k.queue, k.over = nil, true
	r := k.current.Load()
	late := r != nil && r.cause == agentapi.OutcomeTimeout
	if !k.isReady {
		close(k.ready)
	}
	k.mu.Unlock()

	if r != nil {
		end := agentapi.End{Outcome: outcome, Lost: true, Message: message + "; variables are lost, the next run starts a fresh kernel", Signal: exit.signal, ExitCode: exit.code}
		if late {
			end.Outcome = agentapi.OutcomeTimeout
			end.Message = fmt.Sprintf("the time limit of %s passed and the cell did not stop when interrupted, so its kernel was killed; variables are lost, the next run starts a fresh kernel", time.Duration(r.params.TimeoutMS)*time.Millisecond)
		}
		if !r.started.Load() {
			end = refusal(fault.New(fault.Gone, "the kernel ended before the cell began: %s", message))
		}
		k.finish(r, end)
	}
	for _, waiting := range queue {
		waiting.link.refuse(fault.New(fault.Gone, "the kernel ended before the cell began: %s", message))
	}
	k.letGo()
	k.a.mu.Lock()
	if k.a.tokens[k.token] == k { // whoever waited for its end may have brought another of the same token since
		delete(k.a.tokens, k.token)
	}
	k.a.mu.Unlock()
	close(k.done)
}

// awaitExit hears how the process ended. One that broke the protocol, or closed its socket and lives on, is killed.
func (k *kernel) awaitExit(why error) (exit kernelExit, known bool) {
	var protocol *agentapi.ProtocolError
	if errors.As(why, &protocol) {
		k.killProcess()
	}
	for range 2 {
		select {
		case exit = <-k.exits:
			return exit, true
		case <-k.gone:
			return k.awaitWord(why)
		case <-time.After(closeGrace):
		}
		if k.ended() {
			return k.awaitWord(why)
		}
		k.mu.Lock()
		if k.killed == "" {
			k.killed = "it closed its connection to the agent"
		}
		k.mu.Unlock()
		k.killProcess()
	}
	return exit, false
}

// askWhy asks whether a kernel that is our child was killed for lack of memory; of others their parent tells.
func (k *kernel) askWhy(exit *kernelExit, known bool, why error) {
	var protocol *agentapi.ProtocolError
	k.mu.Lock()
	ours := k.killed != "" || errors.As(why, &protocol)
	k.mu.Unlock()
	if known && !ours && !k.warm && exit.signal == "SIGKILL" {
		exit.text, exit.oom = k.a.memory.explains(time.Now())
	}
}

// awaitWord waits on for the word about a kernel that is dead, unless we know why: then it would change nothing. The list of
// kernels shows it as dead meanwhile; runs that come wait too, and are refused with the reason.
func (k *kernel) awaitWord(why error) (exit kernelExit, known bool) {
	select {
	case exit = <-k.exits:
		return exit, true
	case <-time.After(exitDelay):
	}
	var protocol *agentapi.ProtocolError
	k.mu.Lock()
	explained := k.killed != "" || errors.As(why, &protocol)
	if !explained {
		k.info.State, k.info.Message = agentapi.KernelDead, unexplained
	}
	k.mu.Unlock()
	if explained {
		return exit, false
	}
	select {
	case exit = <-k.exits:
		return exit, true
	case <-k.dismissed:
	case <-k.a.ending:
	case <-time.After(wordGrace):
	}
	return exit, false
}

// unexplained is all that is told of a dead kernel before the word about it comes.
const unexplained = "the kernel ended"

// obituary is one sentence about a kernel's end.
func (k *kernel) obituary(why error, exit kernelExit, known bool) (agentapi.Outcome, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var protocol *agentapi.ProtocolError
	switch {
	case errors.As(why, &protocol):
		return agentapi.OutcomeKernelDied, "the kernel was killed because it broke its protocol (" + protocol.Reason + ")"
	case known && exit.oom:
		return agentapi.OutcomeOOM, cmp.Or(exit.text, "the kernel was killed because the sandbox ran out of memory")
	case k.killed != "":
		return agentapi.OutcomeKernelDied, "the kernel was killed: " + k.killed
	case known && exit.signal == "SIGKILL":
		return agentapi.OutcomeKernelDied, "the kernel was killed by SIGKILL (lack of memory is the usual reason)"
	case known && exit.signal != "":
		return agentapi.OutcomeKernelDied, "the kernel crashed with " + exit.signal
	case known:
		return agentapi.OutcomeKernelDied, fmt.Sprintf("the kernel exited with status %d (exit() was called?)", exit.code)
	default:
		return agentapi.OutcomeKernelDied, unexplained
	}
}

// lastWords are what a kernel that never took a cell said on standard error: nothing else tells what it lacked.
func (k *kernel) lastWords() string {
	k.mu.Lock()
	ready := k.isReady || k.killed != ""
	k.mu.Unlock()
	if ready {
		return ""
	}
	k.out.Lock()
	defer k.out.Unlock()
	k.drain(nil)
	var said strings.Builder
	for _, p := range k.pending {
		if p.kind == agentapi.FrameStderr {
			said.Write(p.data)
		}
	}
	text := strings.TrimSpace(strings.ToValidUTF8(said.String(), "?"))
	if text == "" {
		return ""
	}
	return "; it said: " + clip(text, maxLastWords)
}

// letGo closes what the agent holds of a kernel. Closing waits for readers, and they wait for out.
func (k *kernel) letGo() {
	k.out.Lock()
	k.shut = true
	k.began.Broadcast()
	k.out.Unlock()
	k.conn.Close()
	if k.inter != nil {
		k.inter.close()
	}
	for _, f := range k.pipes {
		f.Close()
	}
	k.pidfd.Close()
}

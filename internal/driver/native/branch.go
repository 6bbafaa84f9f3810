package native

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Fork makes copies of a running sandbox. Three take part: the agent, which waits for the kernel's turn and has it stand
// still; the maker, which copies it and makes the branches; and we, who bring them together and let the parent go on as
// soon as the maker has what it needs.
func (d *Driver) Fork(ctx context.Context, r sandbox.ForkRequest) (sandbox.Forked, error) {
	asked, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return sandbox.Forked{}, err
	}
	h := &held{}
	made := make(chan madeBranches, 1)
	go func() {
		defer mine.Close()
		response, files, err := d.callFork(asked, r, mine, h.letGo)
		if err != nil {
			// Nobody will speak to the kernel. The agent, which may know better why, is given a moment to say so.
			time.AfterFunc(agentWord, func() { cancel(err) })
		}
		made <- madeBranches{response, files, err}
	}()
	branched, release, err := d.branch(asked, r, theirs)
	theirs.Close() // the kernel has its own, or the maker sees that there is none
	if err != nil {
		if asked.Err() != nil && ctx.Err() == nil {
			err = context.Cause(asked)
		}
		cancel(err)
		got := <-made
		wire.CloseAll(got.files)
		if fault.Is(got.err, fault.Conflict) {
			return sandbox.Forked{}, err // the maker made none, and one of the names may be another's
		}
		return sandbox.Forked{}, d.abandonAll(r.Children, err) // they may have been there before the maker could hear that nobody wants them
	}
	h.take(release, branched.Stalled)
	got := <-made
	h.letGo()
	if got.err != nil {
		if asked.Err() != nil && !fault.Is(got.err, fault.Conflict) {
			return sandbox.Forked{}, d.abandonAll(r.Children, got.err) // as above
		}
		return sandbox.Forked{}, got.err
	}
	forked := *got.response.Forked
	forked.Stall = h.stall
	forked.NotCopied = append(forked.NotCopied, notCopied(branched.Others)...)
	return d.welcome(ctx, r, forked, got.response.Tokens, got.files)
}

// agentWord is how long the agent has to say why a fork failed after the maker gave it up. The
// fork has failed by then, and only its reason is at stake: a caller whose kernel says nothing
// waits this long.
const agentWord = 3 * time.Second

type madeBranches struct {
	response wire.Response
	files    []*os.File
	err      error
}

// held is a kernel that takes no cell. It may be let go before it is known to be held.
type held struct {
	mu      sync.Mutex
	over    bool
	release func()
	since   time.Time
	before  time.Duration // how long it had been held before we heard
	stall   time.Duration
}

func (h *held) take(release func(), before time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.release, h.before, h.since = release, before, time.Now()
	if h.over {
		h.end()
	}
}

func (h *held) letGo() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.over && h.release != nil {
		h.end()
	}
	h.over = true
}

func (h *held) end() {
	h.release()
	h.stall = h.before + time.Since(h.since)
}

func notCopied(lost []agentapi.Lost) []sandbox.NotCopied {
	all := make([]sandbox.NotCopied, 0, len(lost))
	for _, l := range lost {
		all = append(all, sandbox.NotCopied{Kind: l.Kind, What: l.What})
	}
	return all
}

// branch has the parent's agent give the kernel its order.
func (d *Driver) branch(ctx context.Context, r sandbox.ForkRequest, talk *os.File) (agentapi.Branched, func(), error) {
	agent := agentapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return d.dial(ctx, r.Parent, agentapi.MessageBranch, talk)
	})
	return agent.Branch(ctx, agentapi.BranchParams{Kernel: r.Kernel, Refuse: r.Refuse})
}

// callFork is call with a descriptor and two answers.
func (d *Driver) callFork(ctx context.Context, r sandbox.ForkRequest, talk *os.File, cut func()) (wire.Response, []*os.File, error) {
	c, err := d.connect(ctx)
	if err != nil {
		return wire.Response{}, nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	switch err := wire.Send(c, wire.Request{Op: wire.OpFork, Fork: &r}, talk); {
	case errors.Is(err, wire.ErrTooLarge):
		return wire.Response{}, nil, fault.Wrap(fault.Exhausted, err,
			"environment and network lists of %d copies are too large for one fork: make fewer copies at a time", len(r.Children))
	case err != nil:
		return wire.Response{}, nil, fault.Wrap(fault.Unavailable, err, "the maker does not answer")
	}
	for {
		var response wire.Response
		files, err := wire.Receive(c, &response)
		switch {
		case err != nil && ctx.Err() != nil:
			return wire.Response{}, nil, context.Cause(ctx)
		case err != nil:
			return wire.Response{}, nil, fault.Wrap(fault.Unavailable, err, "the maker does not answer")
		case response.Cut:
			cut()
			continue
		case response.Err() != nil:
			wire.CloseAll(files)
			return wire.Response{}, nil, response.Err()
		case response.Forked == nil || len(files) != len(r.Children) || len(response.Tokens) != len(files):
			wire.CloseAll(files)
			return wire.Response{}, nil, fault.New(fault.Internal, "the maker's answer to a fork is not whole")
		}
		return response, files, nil
	}
}

// welcome waits until every branch takes cells.
func (d *Driver) welcome(ctx context.Context, r sandbox.ForkRequest, forked sandbox.Forked, tokens []string, files []*os.File) (sandbox.Forked, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, kernelTime, fault.New(fault.Timeout, "a branch did not start within %v", kernelTime))
	defer cancel()
	var err error
	for i, c := range r.Children {
		d.remember(c.ID)
		err = errors.Join(err, d.keepChannel(c.ID, files[i:i+1]))
	}
	if err == nil {
		var lost []agentapi.Lost
		lost, err = d.awaitAll(ctx, r.Children, tokens)
		forked.NotCopied = append(forked.NotCopied, notCopied(lost)...)
	}
	if err != nil {
		return sandbox.Forked{}, d.abandonAll(r.Children, err)
	}
	return forked, nil
}

// abandonAll stops what there may be of the children of a fork that failed.
func (d *Driver) abandonAll(children []sandbox.ForkChild, cause error) error {
	errs := make([]error, len(children))
	ctx, cancel := context.WithTimeout(context.Background(), abandonTime)
	defer cancel()
	var work sync.WaitGroup
	for i, c := range children {
		work.Go(func() { errs[i] = d.stop(ctx, c.ID, sandbox.CauseStartFail, sandbox.StartFailure(cause)) })
	}
	work.Wait()
	return errors.Join(append([]error{cause}, errs...)...)
}

// awaitAll asks every branch at once whether it takes cells; what the first of them has lost.
func (d *Driver) awaitAll(ctx context.Context, children []sandbox.ForkChild, tokens []string) ([]agentapi.Lost, error) {
	kernels, errs := make([]agentapi.Kernel, len(children)), make([]error, len(children))
	var work sync.WaitGroup
	for i, c := range children {
		work.Go(func() {
			k, err := d.agent(c.ID).KernelWait(ctx, agentapi.KernelParams{Kernel: agentapi.DefaultKernel, Token: tokens[i]})
			if err == nil && k.State == agentapi.KernelDead {
				err = fault.New(fault.Unavailable, "the branch did not start: %s", k.Message)
			}
			kernels[i], errs[i] = k, err
		})
	}
	work.Wait()
	return kernels[0].Lost, cmp.Or(errs...)
}

// Pause stops every process of a sandbox.
func (d *Driver) Pause(ctx context.Context, id string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpPause, ID: id})
	return err
}

// Resume lets a paused sandbox go on.
func (d *Driver) Resume(ctx context.Context, id string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpResume, ID: id})
	return err
}

// Snapshot makes a template of a sandbox's files.
func (d *Driver) Snapshot(ctx context.Context, r sandbox.SnapshotRequest) (*template.Template, error) {
	response, _, err := d.call(ctx, wire.Request{Op: wire.OpSnapshot, Snapshot: &r})
	if err != nil {
		return nil, err
	}
	return response.Template, nil
}

// RemoveTemplate removes a template that Snapshot made.
func (d *Driver) RemoveTemplate(ctx context.Context, tenant, name string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpRemove, Tenant: tenant, Template: name})
	return err
}

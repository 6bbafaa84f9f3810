package cove

import (
	"net/http"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (a *API) fork(c *call) error {
	req := client.ForkRequest{Count: 1} // what is absent stays
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	spec, err := forkOf(req)
	if err != nil {
		return err
	}

	result, err := a.sandboxes.Fork(c.ctx(), c.who, c.id(), spec)
	if err != nil {
		return err
	}

	out := client.ForkResult{
		Sandboxes: make([]client.SandboxInfo, len(result.Sandboxes)), NotCopied: make([]client.NotCopied, len(result.NotCopied)),
		StallMS: float64(result.Stall.Microseconds()) / 1e3, MemoryBytes: result.Memory,
	}
	for i := range result.Sandboxes {
		out.Sandboxes[i] = wireSandbox(&result.Sandboxes[i])
	}
	for i, n := range result.NotCopied {
		out.NotCopied[i] = client.NotCopied(n)
	}
	return c.answer(http.StatusCreated, out)
}

func forkOf(req client.ForkRequest) (sandbox.ForkSpec, error) {
	spec := sandbox.ForkSpec{Count: req.Count, Kernel: req.Kernel, Metadata: req.Metadata, Env: req.Env, InheritEnv: req.InheritEnv}
	switch req.Busy {
	case "", "wait":
	case "refuse":
		spec.Refuse = true
	default:
		return spec, fault.New(fault.Invalid, "busy %.40q: use wait or refuse", req.Busy)
	}
	var err error
	if spec.Wait, err = duration("wait_seconds", req.WaitSeconds); err != nil {
		return spec, err
	}
	spec.Lifetime, err = lifetime("timeout_seconds", req.TimeoutSeconds)
	return spec, err
}

func (a *API) pause(c *call) error {
	var req client.PauseRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	lifetime, err := lifetime("timeout_seconds", req.TimeoutSeconds)
	if err != nil {
		return err
	}

	sb, err := a.sandboxes.Pause(c.ctx(), c.who, c.id(), sandbox.PauseSpec{Lifetime: lifetime, AutoResume: req.AutoResume})
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSandbox(&sb))
}

func (a *API) resume(c *call) error {
	var req client.ResumeRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	lifetime, err := lifetime("timeout_seconds", req.TimeoutSeconds)
	if err != nil {
		return err
	}

	sb, err := a.sandboxes.Resume(c.ctx(), c.who, c.id(), lifetime)
	if err != nil {
		return err
	}

	return c.answer(http.StatusOK, wireSandbox(&sb))
}

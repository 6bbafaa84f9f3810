package cove

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/template"
)

// pullPause is how long progress is gathered before it is told: layers count every chunk, and nobody reads so fast.
const pullPause = 100 * time.Millisecond

func (a *API) pullImage(c *call) error {
	var req client.PullRequest
	if err := c.decode(maxBody, &req); err != nil {
		return err
	}
	if req.Reference == "" {
		return errNoReference
	}
	images, err := a.shelf()
	if err != nil {
		return err
	}
	ask := template.PullRequest{Reference: req.Reference, Username: req.Username, Password: req.Password, Platform: req.Platform, Refresh: !req.IfMissing}
	if wantsJSON(c.r.Header.Get("Accept")) {
		info, err := obtain(c.ctx(), images, c.who.Tenant, ask)
		if err != nil {
			return err
		}
		return c.answer(http.StatusOK, info)
	}
	return a.tellPull(c, images, ask)
}

// obtain gets an image: from its registry, or without asking that when it is here and need not be fresh.
func obtain(ctx context.Context, images Images, tenant string, r template.PullRequest) (client.ImageInfo, error) {
	if r.Refresh {
		return images.Pull(ctx, tenant, r)
	}
	t, err := images.Ensure(ctx, tenant, r)
	if err != nil {
		return client.ImageInfo{}, err
	}
	return imageOf(r.Reference, t), nil
}

// imageOf is a template as the image that it is; one that is none has at least a digest and what it gives its sandboxes.
func imageOf(ref string, t *template.Template) client.ImageInfo {
	info := client.ImageInfo{Reference: ref, Digest: t.Digest, Template: t.Name, Env: t.Env, User: t.User, Workdir: t.Workdir}
	if i := t.Image; i != nil {
		info.Reference, info.Digest, info.Platform, info.Created, info.Bytes = i.Reference, i.Digest, i.Platform, i.Created, i.Bytes
		info.Layers, info.Entrypoint, info.Cmd, info.Labels, info.Ports = i.Layers, i.Entrypoint, i.Cmd, i.Labels, i.Ports
	}
	return info
}

// tellPull gets an image and tells how far it is. A client that leaves ends its part of the pull.
func (a *API) tellPull(c *call, images Images, ask template.PullRequest) error {
	ctx, cancel := context.WithCancel(c.ctx())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	var gathered progress
	gathered.more = make(chan struct{}, 1)
	ask.Progress = gathered.add
	var info client.ImageInfo
	var err error
	done := make(chan struct{})
	work.Go(func() {
		defer close(done)
		info, err = obtain(ctx, images, c.who.Tenant, ask)
	})
	out := newLines(c)
	for gathered.wait(done) {
		if gathered.tell(out) != nil {
			return nil // the client has left
		}
	}
	if err != nil {
		return out.fail(a, err, func(f *client.Fault) any { return client.PullEvent{Type: "fault", Fault: f} })
	}
	if gathered.tell(out) == nil {
		_ = out.write(client.PullEvent{Type: "image", Image: &info}) // the client has gone: nobody to tell
	}
	return nil
}

// progress holds the last word on each layer until it is told, so that a slow reader holds up no pull.
type progress struct {
	more chan struct{}

	mu    sync.Mutex
	order []string
	last  map[string]template.PullProgress
}

func (p *progress) add(e template.PullProgress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == nil {
		p.last = map[string]template.PullProgress{}
	}
	if _, waits := p.last[e.Layer]; !waits {
		p.order = append(p.order, e.Layer)
	}
	p.last[e.Layer] = e
	select {
	case p.more <- struct{}{}:
	default:
	}
}

// wait returns true when there is something to tell, a while after it came, and false at the end.
func (p *progress) wait(done <-chan struct{}) bool {
	select {
	case <-p.more:
	case <-done:
		return false
	}
	timer := time.NewTimer(pullPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

func (p *progress) tell(out *lines) error {
	p.mu.Lock()
	events := make([]template.PullProgress, 0, len(p.order))
	for _, layer := range p.order {
		events = append(events, p.last[layer])
	}
	p.order, p.last = nil, nil
	p.mu.Unlock()
	for e := range slices.Values(events) {
		if err := out.write(client.PullEvent{Type: "progress", Step: e.Step, Layer: e.Layer, Done: e.Done, Total: e.Total}); err != nil {
			return err
		}
	}
	return nil
}

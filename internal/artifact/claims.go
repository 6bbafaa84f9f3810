package artifact

import "sync"

// claims keeps a sweeper and a writer from the same blob: between a blob and the row that names it there is a moment in
// which nobody seems to want it.
type claims struct {
	mu      sync.Mutex
	writers map[Ref]int
	doomed  map[Ref]chan struct{} // closed when its removal is over
}

// want holds a blob until it is let go; it waits for one that is just being removed.
func (c *claims) want(r Ref) {
	for {
		c.mu.Lock()
		over, doomed := c.doomed[r]
		if !doomed {
			if c.writers == nil {
				c.writers = map[Ref]int{}
			}
			c.writers[r]++
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		<-over
	}
}

func (c *claims) let(refs []Ref) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range refs {
		if c.writers[r]--; c.writers[r] <= 0 {
			delete(c.writers, r)
		}
	}
}

// doom takes a blob that nobody holds, for its removal; release ends that.
func (c *claims) doom(r Ref) (release func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, taken := c.doomed[r]; taken || c.writers[r] > 0 {
		return nil, false
	}
	if c.doomed == nil {
		c.doomed = map[Ref]chan struct{}{}
	}
	over := make(chan struct{})
	c.doomed[r] = over
	return func() {
		c.mu.Lock()
		delete(c.doomed, r)
		c.mu.Unlock()
		close(over)
	}, true
}

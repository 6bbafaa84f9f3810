package agentapi

import "context"

// Halt ends every process and kernel of the sandbox and every other operation, and returns when they are gone; files stay.
func (c *Client) Halt(ctx context.Context) error { return c.call(ctx, OpHalt, nil, nil) }

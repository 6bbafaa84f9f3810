package agentapi

import "context"

// SymlinkParams make a symbolic link, with the directories above it, or take it away.
type SymlinkParams struct {
	Path   string `json:"path"`
	Target string `json:"target"` // where it leads, as it is written
	User   string `json:"user,omitempty"`
	Root   bool   `json:"root,omitempty"`
	Remove bool   `json:"remove,omitempty"` // only one that leads to Target; anything else stays
}

// Symlink makes a link, or removes it. One that leads there already is no error; anything else in its place is fault.Conflict
// and stays.
func (c *Client) Symlink(ctx context.Context, p SymlinkParams) error {
	return c.call(ctx, OpSymlink, p, nil)
}

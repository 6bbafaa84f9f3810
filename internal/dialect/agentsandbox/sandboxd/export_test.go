package sandboxd

// At makes a handler whose home is elsewhere: the sandboxes of tests have no root of their own.
func (h *Handler) At(dir string) *Handler {
	h.home = dir
	return h
}

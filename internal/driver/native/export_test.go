package native

// Connections are those to the maker that wait to be used again.
func (d *Driver) Connections() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.idle)
}

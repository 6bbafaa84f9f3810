package runtime

import "time"

// At makes a runtime whose home is elsewhere: the sandboxes of tests have no root of their own.
func (rt *Runtime) At(dir string) *Runtime {
	rt.home = dir
	return rt
}

// Disposition is what a part's header says.
func Disposition(header string) (name, filename string) {
	d := parseDisposition(header)
	return d.name, d.filename
}

// Runs is how many commands are known.
func (rt *Runtime) Runs() int {
	rt.runs.mu.Lock()
	defer rt.runs.mu.Unlock()
	return rt.runs.count
}

// Left is how many commands nobody waits for.
func (rt *Runtime) Left() (n int) {
	rt.runs.mu.Lock()
	defer rt.runs.mu.Unlock()
	for _, list := range rt.runs.by {
		for _, r := range list {
			if r.alone {
				n++
			}
		}
	}
	return n
}

// Kept is how many bytes of output are.
func (rt *Runtime) Kept() int64 { return rt.shelves.all.taken.Load() }

// Limits is when a command is killed, and when its client is answered, if the client waits so long.
func Limits(wait time.Duration) (kill, answer time.Duration) {
	return (&executeRequest{patience: wait}).limits()
}

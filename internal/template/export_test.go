package template

import "time"

// SetDpkgPatience bounds how long a build waits for the host's package manager, until restore.
func SetDpkgPatience(d time.Duration) (restore func()) {
	before := dpkgPatience
	dpkgPatience = d
	return func() { dpkgPatience = before }
}

// Together has a command end with what it starts.
var Together = together

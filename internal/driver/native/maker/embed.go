package maker

import "embed"

// embedded holds the shell and agent programs, which make builds first.
//
//go:embed all:embedded
var embedded embed.FS

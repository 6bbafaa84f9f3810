// Command cove-agent is the process inside every sandbox.
//
// It sets the number of its threads by itself, and does not ask the host's cgroups for it.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0
package main

import (
	"os"

	"github.com/covehq/cove/internal/agent"
)

func main() { os.Exit(agent.Main(os.Args)) }

// Command cove-agent is the process inside every sandbox.
package main

import (
	"os"

	"github.com/covehq/cove/internal/agent"
)

func main() { os.Exit(agent.Main(os.Args)) }

// Command cove-pod is the process inside every Pod of the kubernetes driver.
package main

import (
	"os"

	"github.com/covehq/cove/internal/driver/kubernetes/pod"
)

func main() { os.Exit(pod.Main(os.Args, os.Stderr)) }

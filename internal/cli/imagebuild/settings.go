package imagebuild

import (
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/cli/dockerfile"
)

var defaultShell = []string{"/bin/sh", "-c"}

// settings are what a Dockerfile decides beyond files.
type settings struct {
	env        map[string]string
	set        map[string]string // of env, by this stage
	user       string
	workdir    string
	shell      []string
	entrypoint []string
	cmd        []string
	ownCmd     bool // cmd is of this stage
	labels     map[string]string
	ports      []string
}

// clone can be changed without changing the other.
func (s settings) clone() settings {
	s.env, s.set, s.labels = cloned(s.env), cloned(s.set), cloned(s.labels)
	s.ports = slices.Clone(s.ports)
	return s
}

// next is what a stage begins with that is made from one with these settings.
func (s settings) next() settings {
	s = s.clone()
	s.set, s.ownCmd = map[string]string{}, false
	return s
}

func cloned(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return maps.Clone(m)
}

// arguments are the ARGs that are known at some place of a file, with their values.
type arguments map[string]string

func (a arguments) lookup(name string) (string, bool) {
	if v, ok := a[name]; ok {
		return v, true
	}
	v, ok := predefined[name]
	return v, ok
}

// predefined are arguments that FROM lines may use without an ARG, and stages with one.
var predefined = map[string]string{
	"TARGETPLATFORM": "linux/" + runtime.GOARCH, "TARGETOS": "linux", "TARGETARCH": runtime.GOARCH, "TARGETVARIANT": "",
	"BUILDPLATFORM": "linux/" + runtime.GOARCH, "BUILDOS": "linux", "BUILDARCH": runtime.GOARCH, "BUILDVARIANT": "",
}

// proxies are arguments that commands see without an ARG. The same files come through any of them, so they are in no key.
func (b *builder) proxies() map[string]string {
	env := map[string]string{}
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY"} {
		for _, name := range []string{name, strings.ToLower(name)} {
			if value, given := b.Args[name]; given {
				env[name], b.used[name] = value, true
			}
		}
	}
	return env
}

// globals are the arguments above the first FROM.
func (b *builder) globals() (arguments, error) {
	args := arguments{}
	for i := range b.file.Args {
		if err := b.declare(&b.file.Args[i], args, nil, args.lookup); err != nil {
			return nil, err
		}
	}
	return args, nil
}

// declare follows an ARG: its value is that of --build-arg, else its default, else what the lines above FROM gave it.
func (b *builder) declare(i *dockerfile.Instruction, args, outer arguments, known dockerfile.Lookup) error {
	pairs, err := b.file.Pairs(i, known)
	if err != nil {
		return err
	}
	for n, p := range pairs {
		value, given := b.Args[p.Name]
		inherited, above := outer.lookup(p.Name)
		hasDefault := len(i.Words[n]) > len(p.Name)
		b.used[p.Name] = true
		switch {
		case given:
			args[p.Name] = value
		case hasDefault:
			args[p.Name] = p.Value
		case above && outer != nil:
			args[p.Name] = inherited
		}
	}
	return nil
}

// Package place is where agent-sandbox's clients look for things in a sandbox, which its two runtimes and whoever leads to them have
// in common: their ports, the home, and what a path means. Clients name one file in four ways: /tmp/x is sent as
// "/tmp/x", "tmp/x" (versions from 0.5 on take the slash off what they write and read), "../tmp/x" (seen from the home) or "x" (0.4
// writes the base name only). The rules here make all but the last meet what a command of the sandbox calls /tmp/x. The home is no
// fence: the same user can run commands.
package place

import (
	"context"
	"path"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// maxPath is what Linux takes.
const maxPath = 4096

// Check refuses what no file can be called.
func Check(name string) error {
	switch {
	case strings.ContainsRune(name, 0):
		return fault.New(fault.Invalid, "a path cannot hold a NUL byte")
	case len(name) > maxPath:
		return fault.New(fault.Invalid, "a path has at most %d bytes", maxPath)
	}
	return nil
}

// candidates are the places that a path may mean for whoever reads, the likelier first.
func candidates(home, name string) []string {
	if strings.HasPrefix(name, "/") {
		list := []string{path.Clean(name)}
		if under := path.Join(home, name); under != list[0] { // for those who know of nothing but the home
			list = append(list, under)
		}
		return list
	}
	list := []string{path.Join(home, name)}
	if fromRoot := path.Join("/", name); explicit(name) == "" && fromRoot != list[0] && fromRoot != "/" {
		list = append(list, fromRoot)
	}
	return list
}

// explicit is the first part of a relative path that says itself where it begins: "." or "..".
func explicit(name string) string {
	first, _, _ := strings.Cut(name, "/")
	if first == "." || first == ".." {
		return first
	}
	return ""
}

// ambiguous gives the first part of a relative path that could be seen from the root as well; it has more parts.
func ambiguous(name string) (first string, ok bool) {
	if name == "" || strings.HasPrefix(name, "/") || explicit(name) != "" {
		return "", false
	}
	first, rest, ok := strings.Cut(path.Clean(name), "/")
	return first, ok && rest != "" && first != ".."
}

// Readable finds what a path means for whoever reads: the first candidate that there is. One that may not be looked at counts as
// there: what is then done with it says why it cannot be.
func Readable(ctx context.Context, agent *agentapi.Client, home, name string) (at string, e agentapi.Entry, err error) {
	if err := Check(name); err != nil {
		return "", e, err
	}
	var first error
	for _, at := range candidates(home, name) {
		e, err := agent.Stat(ctx, agentapi.PathParams{Path: at})
		if err == nil {
			return at, e, nil
		}
		if first == nil {
			first = err
		}
		if !Absent(err) {
			return at, e, err
		}
	}
	return "", e, first
}

// IsHome tells whether a path may mean the home itself.
func IsHome(home, name string) bool { return slices.Contains(candidates(home, name), home) }

// Absent tells whether an error says that there is no such file, also because something above it is none.
func Absent(err error) bool { return fault.Is(err, fault.NotFound) || fault.Is(err, fault.Invalid) }

// Writable finds what a path means for whoever writes. One that could be seen from the home and from the root is the root's if
// its first part is a directory there and nothing in the home.
func Writable(ctx context.Context, agent *agentapi.Client, home, name string) (string, error) {
	if err := Check(name); err != nil {
		return "", err
	}
	if name == "" || strings.HasSuffix(name, "/") {
		return "", fault.New(fault.Invalid, "the path %.200q names no file", name)
	}
	if strings.HasPrefix(name, "/") {
		return path.Clean(name), nil
	}
	here := path.Join(home, name)
	first, ok := ambiguous(name)
	if !ok {
		return here, nil
	}
	if _, err := agent.Stat(ctx, agentapi.PathParams{Path: path.Join(home, first)}); !fault.Is(err, fault.NotFound) {
		return here, nil
	}
	top, err := agent.Stat(ctx, agentapi.PathParams{Path: "/" + first})
	if err == nil && IsDir(top) {
		return path.Join("/", name), nil
	}
	return here, nil
}

// IsDir tells whether an entry is a directory, or a link that leads to one.
func IsDir(e agentapi.Entry) bool { return kindOf(e) == agentapi.EntryDir }

// kindOf is what an entry is once links are followed.
func kindOf(e agentapi.Entry) agentapi.EntryType {
	if e.Type == agentapi.EntrySymlink && e.Link != nil {
		return e.Link.Type
	}
	return e.Type
}

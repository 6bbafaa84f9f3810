package imagebuild

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// ignore is what a .dockerignore file leaves out of the files that can be copied: the last pattern that fits decides.
type ignore []exclusion

type exclusion struct {
	form *regexp.Regexp
	keep bool // begins with !
}

// parseIgnore reads a .dockerignore file.
func parseIgnore(name string, text []byte) (ignore, error) {
	var all ignore
	for n, line := range strings.Split(strings.TrimPrefix(string(text), "\ufeff"), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		line, keep := strings.CutPrefix(line, "!")
		line = strings.TrimPrefix(path.Clean("/"+strings.TrimSpace(line)), "/")
		if line == "" {
			continue // the whole directory cannot be meant
		}
		form, err := wildcard(line)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: pattern %.60q: %w", name, n+1, line, err)
		}
		all = append(all, exclusion{form, keep})
	}
	return all, nil
}

// excludes tells whether a file is left out: itself, or a directory above it.
func (i ignore) excludes(file string) bool {
	out := false
	for _, e := range i {
		if e.form.MatchString(file) {
			out = !e.keep
		}
	}
	return out
}

// keeps tells whether something below a directory that is left out may still be wanted.
func (i ignore) keeps() bool {
	for _, e := range i {
		if e.keep {
			return true
		}
	}
	return false
}

// wildcard is a pattern as an expression that fits a path, and every path below it. * and ? stop at slashes, ** does not.
func wildcard(pattern string) (*regexp.Regexp, error) {
	var b strings.Builder
	b.WriteString("^")
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; c {
		case '*':
			if !strings.HasPrefix(pattern[i:], "**") {
				b.WriteString("[^/]*")
				break
			}
			i++
			if strings.HasPrefix(pattern[i+1:], "/") { // any number of directories, also none
				i++
				b.WriteString("(?:.*/)?")
				break
			}
			b.WriteString(".*")
		case '?':
			b.WriteString("[^/]")
		case '[':
			end := strings.IndexByte(pattern[i+1:], ']')
			if end <= 0 {
				return nil, path.ErrBadPattern
			}
			set := pattern[i+1 : i+1+end]
			b.WriteString("[" + strings.ReplaceAll(set, `[`, `\[`) + "]")
			i += end + 1
		case '\\':
			if i++; i == len(pattern) {
				return nil, path.ErrBadPattern
			}
			b.WriteString(regexp.QuoteMeta(pattern[i : i+1]))
		default:
			b.WriteString(regexp.QuoteMeta(string(c)))
		}
	}
	b.WriteString("(?:/.*)?$")
	return regexp.Compile(b.String())
}

package imagebuild

import (
	"context"
	"strings"
)

// Excluded tells which of some files a .dockerignore leaves out.
func Excluded(text string, files ...string) ([]string, error) {
	i, err := parseIgnore(".dockerignore", []byte(text))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, f := range files {
		if i.excludes(f) {
			out = append(out, f)
		}
	}
	return out, nil
}

// Copied tells what COPY would copy from a directory, and where to.
func Copied(ctx context.Context, dir string, sources ...string) ([]string, error) {
	l, err := openLocal(dir, dir+"/Dockerfile")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c := &copying{sources: sources}
	if err := c.find(ctx, l); err != nil {
		return nil, err
	}
	var out []string
	for _, i := range c.items {
		line := string(i.kind) + " " + i.to
		if i.link != "" {
			line += " -> " + i.link
		}
		out = append(out, strings.TrimSpace(line))
	}
	return out, nil
}

// ParseIgnore reads a .dockerignore file and asks it about a path.
func ParseIgnore(text, file string) (bool, error) {
	i, err := parseIgnore("x", []byte(text))
	return err == nil && i.excludes(file), err
}

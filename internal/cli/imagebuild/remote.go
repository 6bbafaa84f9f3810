package imagebuild

import (
	"context"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/covehq/cove/client"
)

// remote is the files of a sandbox that was started from another stage or image.
type remote struct {
	files client.Files
	about string // whose files they are
}

// maxListDepth is how deep the files of a sandbox are listed at once.
const maxListDepth = 64

func (r *remote) stat(ctx context.Context, name string) (node, error) {
	at := name
	for range 40 { // as many links as a kernel follows
		e, err := r.files.Stat(ctx, "/"+at)
		if client.KindOf(err) == client.NotFound {
			return node{}, fmt.Errorf("there is no /%s in %s", name, r.about)
		}
		if err != nil {
			return node{}, err
		}
		if e.Type != "symlink" {
			n, err := remoteNode(at, &e)
			return n, err
		}
		if !path.IsAbs(e.Target) {
			e.Target = path.Join("/", path.Dir(at), e.Target)
		}
		at = path.Clean(e.Target)[1:]
	}
	return node{}, fmt.Errorf("/%s in %s is a link without an end", name, r.about)
}

func remoteNode(name string, e *client.Entry) (node, error) {
	n := node{path: name, mode: e.Mode, size: e.Size, link: e.Target}
	switch e.Type {
	case "file":
		n.kind = kindFile
	case "dir":
		n.kind = kindDir
	case "symlink":
		n.kind = kindLink
	default:
		return n, fmt.Errorf("/%s is neither a file nor a directory nor a link", name)
	}
	return n, nil
}

func (r *remote) below(ctx context.Context, name string) ([]node, error) {
	list, err := r.files.List(ctx, path.Join("/", name), maxListDepth)
	if err != nil {
		return nil, err
	}
	var all []node
	for i := range list {
		n, err := remoteNode(path.Clean(list[i].Path)[1:], &list[i])
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b node) int { return strings.Compare(a.path, b.path) }) // parents first
	return withParents(name, all), nil
}

func (r *remote) names(ctx context.Context, name string) ([]string, error) {
	list, err := r.files.List(ctx, path.Join("/", name), 1)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, e := range list {
		all = append(all, e.Name)
	}
	return all, nil
}

func (r *remote) open(ctx context.Context, name string) (io.ReadCloser, error) {
	return r.files.Open(ctx, "/"+name)
}

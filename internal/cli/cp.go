package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

// copied is what a copy did.
type copied struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Files int    `json:"files"`
	Bytes int64  `json:"bytes"`
}

func (a *invocation) cp() *cobra.Command {
	var recursive bool
	c := &cobra.Command{
		Use:   "cp SOURCE TARGET",
		Short: "Copy files into or out of a sandbox",
		Long: "Copy a file, or with -r a directory; the side in the sandbox is written ID:PATH, and - is standard input or output.\n" +
			"The content streams: size does not matter, and a file appears whole or not at all. A relative path in the sandbox starts\n" +
			"at its user's home; a target that is a directory gets the source into it. A directory is packed by the sandbox's own\n" +
			"tar; links stay links, and nothing is written outside the target.",
		Example:           "  cove cp data.csv sbabc:data.csv\n  cove cp sbabc:/home/user/plot.png .\n  cove cp -r ./project sbabc:",
		Args:              exactArgs(2, "a source and a target, one of them as ID:PATH"),
		ValidArgsFunction: a.completePlace,
		RunE: func(c *cobra.Command, args []string) error {
			fromName, from, fromInside := place(args[0])
			toName, to, toInside := place(args[1])
			if fromInside == toInside {
				return usageError{errors.New("exactly one of the two is in a sandbox: write it as ID:PATH")}
			}
			_, sb, err := a.target(c.Context(), fromName+toName)
			if err != nil {
				return err
			}
			copier := a.upload
			switch {
			case toInside && recursive:
				copier = a.uploadTree
			case !toInside && recursive:
				copier = a.downloadTree
			case !toInside:
				copier = a.download
			}
			done, err := copier(c.Context(), sb, from, to)
			if err != nil || !a.json || to == "-" {
				return err
			}
			done.From, done.To = args[0], args[1]
			return a.print(done, nil)
		},
	}
	c.Flags().BoolVarP(&recursive, "recursive", "r", false, "copy a directory with everything below it")
	return c
}

// place splits ID:PATH; a path of this machine has no colon before its first slash.
func place(arg string) (id, file string, inside bool) {
	id, file, ok := strings.Cut(arg, ":")
	if !ok || id == "" || strings.ContainsAny(id, "/.") {
		return "", arg, false
	}
	return id, file, true
}

// errDirectory is a directory where a file was meant.
func errDirectory(name string) error {
	return usageError{fmt.Errorf("%s is a directory; copy it with -r", name)}
}

func (a *invocation) upload(ctx context.Context, sb *client.Sandbox, from, to string) (copied, error) {
	m := &meter{Reader: a.In}
	options := client.WriteOptions{}
	if from == "-" {
		if to == "" || strings.HasSuffix(to, "/") {
			return copied{}, usageError{errors.New("standard input has no name; give the target one")}
		}
	} else {
		f, err := os.Open(from)
		if err != nil {
			return copied{}, err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return copied{}, err
		}
		if info.IsDir() {
			return copied{}, errDirectory(from)
		}
		if to, err = insideTarget(ctx, sb, from, to); err != nil {
			return copied{}, err
		}
		m.Reader, m.total, options.Mode = f, info.Size(), uint32(info.Mode().Perm())
	}
	defer a.working(m.progress("copying " + from))()
	e, err := sb.Files().Write(ctx, to, m, options)
	return copied{Files: 1, Bytes: e.Size}, err
}

// insideTarget is where a source goes in the sandbox: into a directory, or under the name that was given.
func insideTarget(ctx context.Context, sb *client.Sandbox, from, to string) (string, error) {
	name, err := filepath.Abs(from) // so that . has a name
	if err != nil {
		return "", err
	}
	if to == "" || strings.HasSuffix(to, "/") {
		return path.Join(to, filepath.Base(name)), nil
	}
	e, err := sb.Files().Stat(ctx, to)
	switch {
	case err == nil && e.Type == "dir":
		return path.Join(to, filepath.Base(name)), nil
	case err != nil && client.KindOf(err) != client.NotFound:
		return "", err
	}
	return to, nil
}

func (a *invocation) download(ctx context.Context, sb *client.Sandbox, from, to string) (copied, error) {
	entry, err := sb.Files().Stat(ctx, from)
	if err != nil {
		return copied{}, err
	}
	if entry.Type == "dir" {
		return copied{}, errDirectory(from)
	}
	content, err := sb.Files().Open(ctx, from)
	if err != nil {
		return copied{}, err
	}
	defer content.Close()
	m := &meter{Reader: content, total: entry.Size}
	if to == "-" {
		_, err := io.Copy(a.Out, m)
		return copied{Files: 1, Bytes: m.done.Load()}, err
	}
	defer a.working(m.progress("copying " + from))()
	err = save(hereTarget(from, to), m, os.FileMode(entry.Mode)&0o777)
	return copied{Files: 1, Bytes: m.done.Load()}, err
}

// hereTarget is where a source goes on this machine. Its name is the sandbox's word: only the last element is taken.
func hereTarget(from, to string) string {
	if info, err := os.Stat(to); err == nil && info.IsDir() || strings.HasSuffix(to, "/") {
		return filepath.Join(to, filepath.Base(path.Clean("/"+from)))
	}
	return to
}

// save writes a file that appears whole or not at all.
func save(name string, content io.Reader, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".cove-cp-*")
	var refused *fs.PathError
	if errors.As(err, &refused) { // of a name that nobody gave
		return fmt.Errorf("write to %s: %w", filepath.Dir(name), refused.Err)
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // the copy's own error is the news
	}
	return err
}

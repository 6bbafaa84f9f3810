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

func (a *invocation) cp() *cobra.Command {
	var recursive bool
	c := &cobra.Command{
		Use:     "cp SOURCE TARGET",
		Short:   "Copy a file into or out of a sandbox",
		Long:    "Copy one file; the side in the sandbox is written ID:PATH, and - is standard input or output.\nThe content streams: size does not matter, and a target appears whole or not at all.",
		Example: "  cove cp data.csv sb1:data.csv\n  cove cp sb1:/home/user/plot.png .",
		Args:    exactArgs(2, "a source and a target, one of them as ID:PATH"),
		RunE: func(c *cobra.Command, args []string) error {
			if recursive {
				return errors.New("copying directories is not supported yet; pack one with `cove exec ID -- tar -cf /tmp/d.tar DIR` and copy the archive")
			}
			fromID, from, fromInside := place(args[0])
			toID, to, toInside := place(args[1])
			if fromInside == toInside {
				return usageError{errors.New("exactly one of the two is in a sandbox: write it as ID:PATH")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			var done client.Entry
			if toInside {
				done, err = a.upload(c.Context(), cl.Sandbox(toID), from, to)
			} else {
				done, err = a.download(c.Context(), cl.Sandbox(fromID), from, to)
			}
			if err != nil || !a.json {
				return err
			}
			return a.print(done, nil)
		},
	}
	c.Flags().BoolVarP(&recursive, "recursive", "r", false, "copy a directory (not supported yet)")
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

func (a *invocation) upload(ctx context.Context, sb *client.Sandbox, from, to string) (client.Entry, error) {
	if from == "-" {
		return sb.Files().Write(ctx, to, a.In, client.WriteOptions{})
	}
	f, err := os.Open(from)
	if err != nil {
		return client.Entry{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return client.Entry{}, err
	}
	if info.IsDir() {
		return client.Entry{}, fmt.Errorf("%s is a directory; only files can be copied yet", from)
	}
	if to == "" || strings.HasSuffix(to, "/") {
		to = path.Join(to, filepath.Base(from))
	} else if e, err := sb.Files().Stat(ctx, to); err == nil && e.Type == "dir" {
		to = path.Join(to, filepath.Base(from))
	}
	return sb.Files().Write(ctx, to, f, client.WriteOptions{Mode: uint32(info.Mode().Perm())})
}

func (a *invocation) download(ctx context.Context, sb *client.Sandbox, from, to string) (client.Entry, error) {
	entry, err := sb.Files().Stat(ctx, from)
	if err != nil {
		return entry, err
	}
	if entry.Type == "dir" {
		return entry, fmt.Errorf("%s is a directory; only files can be copied yet", from)
	}
	content, err := sb.Files().Open(ctx, from)
	if err != nil {
		return entry, err
	}
	defer content.Close()
	if to == "-" {
		_, err := io.Copy(a.Out, content)
		return entry, err
	}
	if info, err := os.Stat(to); err == nil && info.IsDir() || strings.HasSuffix(to, "/") {
		// The name is the sandbox's word: only its last element is taken.
		to = filepath.Join(to, filepath.Base(path.Clean("/"+from)))
	}
	return entry, save(to, content, os.FileMode(entry.Mode)&0o777)
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

package cli

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/covehq/cove/client"
)

// uploadTree sends a directory through a pipe to the sandbox's tar.
func (a *invocation) uploadTree(ctx context.Context, sb *client.Sandbox, from, to string) (copied, error) {
	if info, err := os.Stat(from); err != nil {
		return copied{}, err
	} else if !info.IsDir() {
		return a.upload(ctx, sb, from, to)
	}
	to, err := insideTarget(ctx, sb, from, to)
	if err != nil {
		return copied{}, err
	}
	made, err := sb.Files().Mkdir(ctx, to)
	if err != nil {
		return copied{}, err
	}
	session, err := sb.Start(ctx, client.ExecRequest{Argv: []string{"tar", "-x", "-o", "-f", "-", "-C", made.Path}})
	if err != nil {
		return copied{}, err
	}
	defer session.Close()
	var done copied
	m := &meter{}
	sent := make(chan error, 1)
	go func() {
		err := addTree(io.MultiWriter(struct{ io.Writer }{session}, m), from, &done)
		if err != nil {
			session.Close() // half a tree is no tree
		} else {
			_ = session.CloseStdin() // a tar that has seen the end of the archive may be gone
		}
		sent <- err
	}()
	defer a.working(m.progress("copying " + from))()
	err = drain(session, io.Discard)
	session.Close()
	sendErr := <-sent
	var tarErr tarError
	if sendErr != nil && err != nil && !errors.As(err, &tarErr) {
		err = sendErr // which cut the session
	}
	return done, err
}

// addTree packs a directory: files, directories and links.
func addTree(to io.Writer, dir string, done *copied) error {
	buffered := bufio.NewWriterSize(to, 64<<10)
	w := tar.NewWriter(buffered)
	root := os.DirFS(dir)
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var target string
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			if target, err = fs.ReadLink(root, name); err != nil {
				return err
			}
		case !info.IsDir() && !info.Mode().IsRegular():
			return fmt.Errorf("%s is neither a file nor a directory nor a link", filepath.Join(dir, name))
		}
		h, err := tar.FileInfoHeader(info, target)
		if err != nil {
			return err
		}
		h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
		if info.IsDir() {
			h.Name += "/"
		}
		if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := io.Copy(w, f)
		done.Files, done.Bytes = done.Files+1, done.Bytes+n
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(w.Close(), buffered.Flush())
}

// downloadTree unpacks what the sandbox's tar sends. All of it is the sandbox's word.
func (a *invocation) downloadTree(ctx context.Context, sb *client.Sandbox, from, to string) (copied, error) {
	entry, err := sb.Files().Stat(ctx, cmp.Or(from, "."))
	if err != nil {
		return copied{}, err
	}
	if entry.Type != "dir" {
		return a.download(ctx, sb, from, to)
	}
	target := hereTarget(entry.Path, to)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return copied{}, err
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return copied{}, err
	}
	defer root.Close()
	session, err := sb.Start(ctx, client.ExecRequest{Argv: []string{"tar", "-c", "-f", "-", "-C", entry.Path, "."}})
	if err != nil {
		return copied{}, err
	}
	defer session.Close()
	packed, pack := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		pack.CloseWithError(drain(session, pack)) // the reader hears how tar ended
	}()
	m := &meter{Reader: packed}
	defer a.working(m.progress("copying " + from))()
	var done copied
	err = unpack(tar.NewReader(bufio.NewReader(m)), root, &done)
	if err == nil {
		_, err = io.Copy(io.Discard, packed)
	}
	packed.Close()
	session.Close()
	<-ended
	return done, err
}

// tarError is what the sandbox's tar had to say.
type tarError string

func (e tarError) Error() string { return "tar in the sandbox: " + string(e) }

// drain reads a command to its end; its output goes to out, and what it says of a failure into the error.
func drain(session *client.Session, out io.Writer) error {
	var said strings.Builder
	for e, err := range session.Events() {
		if err != nil {
			return err
		}
		switch e.Type {
		case client.EventStdout:
			if _, err := out.Write(e.Data()); err != nil {
				return err
			}
		case client.EventStderr:
			if said.Len() < 4<<10 {
				said.Write(e.Data())
			}
		case client.EventEnd:
			if e.End.Outcome == client.OutcomeOK {
				return nil
			}
			return tarError(strings.TrimSpace(said.String() + " " + e.End.Message))
		}
	}
	return nil
}

// unpack writes below root and nowhere else, whatever the names and links say. Permission bits are taken, owners and
// setuid are not.
func unpack(r *tar.Reader, root *os.Root, done *copied) error {
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name, mode := path.Clean(h.Name), h.FileInfo().Mode().Perm()
		if name == "." {
			continue
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, mode|0o700) // we still have to write into it
		case tar.TypeReg:
			var n int64
			n, err = unpackFile(r, root, name, mode)
			done.Files, done.Bytes = done.Files+1, done.Bytes+n
		case tar.TypeSymlink:
			if err = root.Remove(name); err == nil || errors.Is(err, fs.ErrNotExist) {
				err = root.Symlink(h.Linkname, name)
			}
		case tar.TypeLink:
			if err = root.Remove(name); err == nil || errors.Is(err, fs.ErrNotExist) {
				err = root.Link(path.Clean(h.Linkname), name)
			}
		default: // devices and sockets mean nothing here
			continue
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
}

func unpackFile(r io.Reader, root *os.Root, name string, mode fs.FileMode) (int64, error) {
	// One that is there, or a link in its place, is replaced and not followed.
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, r)
	return n, errors.Join(err, f.Close())
}

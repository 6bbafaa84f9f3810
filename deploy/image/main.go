// Command image writes a container image as one archive that docker load, ctr images import and registries' tools take. It
// starts from nothing and pulls nothing: its files are those it is given. The same files give the same image.
//
//	go run ./deploy/image -o cove.tar -tag cove:dev -entrypoint /cove bin/cove=/cove
package main

import (
	"archive/tar"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// list is a flag that may be given several times.
type list []string

func (l *list) String() string { return strings.Join(*l, " ") }

// Set adds one more.
func (l *list) Set(s string) error {
	*l = append(*l, s)
	return nil
}

// request is what the image is to be.
type request struct {
	out, tag, tree string
	files          []string // FILE=PATH: a file of this machine at a path of the image; =PATH an empty directory
	config         v1.Config
}

func main() {
	r, err := parse(os.Args[1:], os.Stderr)
	if err == nil {
		err = write(r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func parse(args []string, log io.Writer) (request, error) {
	var (
		r                          request
		env, entrypoint, cmd, dirs list
	)
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.SetOutput(log)
	flags.StringVar(&r.out, "o", "", "the archive to write")
	flags.StringVar(&r.tag, "tag", "", "the image's name")
	flags.StringVar(&r.tree, "tree", "", "a directory that becomes the image's root")
	flags.StringVar(&r.config.User, "user", "", "who its processes are")
	flags.StringVar(&r.config.WorkingDir, "workdir", "", "where they start")
	flags.Var(&env, "env", "NAME=VALUE, several times")
	flags.Var(&entrypoint, "entrypoint", "the program and its first arguments, one at a time")
	flags.Var(&cmd, "cmd", "further arguments where nobody says otherwise, one at a time")
	flags.Var(&dirs, "dir", "an empty directory that everybody may write to, several times")
	if err := flags.Parse(args); err != nil {
		return r, err
	}
	if r.out == "" || r.tag == "" {
		return r, errors.New("-o and -tag are needed")
	}
	r.config.Env, r.config.Entrypoint, r.config.Cmd, r.files = env, entrypoint, cmd, flags.Args()
	for _, dir := range dirs {
		r.files = append(r.files, "="+dir)
	}
	return r, nil
}

// write makes the archive beside its place and moves it there, so that nobody loads half of one.
func write(r request) error {
	tag, err := name.NewTag(r.tag)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp(filepath.Dir(r.out), ".image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	layer := filepath.Join(work, "layer.tar")
	if err := pack(layer, r); err != nil {
		return err
	}
	content, err := tarball.LayerFromFile(layer)
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, content)
	if err != nil {
		return err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config, file.Created = "linux", runtime.GOARCH, r.config, v1.Time{Time: epoch}
	if image, err = mutate.ConfigFile(image, file); err != nil {
		return err
	}
	archive := filepath.Join(work, "image.tar")
	if err := tarball.WriteToFile(archive, tag, image); err != nil {
		return err
	}
	return os.Rename(archive, r.out)
}

var epoch = time.Unix(0, 0).UTC()

func pack(file string, r request) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	if r.tree != "" {
		if err := packTree(w, r.tree); err != nil {
			return err
		}
	}
	made := map[string]bool{}
	for _, pair := range r.files {
		if err := packFile(w, made, pair); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return out.Close()
}

// packFile takes FILE=PATH; without FILE it makes a directory. Directories above it are made once.
func packFile(w *tar.Writer, made map[string]bool, pair string) error {
	from, to, ok := strings.Cut(pair, "=")
	if !ok || !path.IsAbs(to) || path.Clean(to) != to || to == "/" {
		return fmt.Errorf("%q: write FILE=/PATH", pair)
	}
	for i := range to {
		if dir := to[:i]; i > 0 && to[i] == '/' && !made[dir] {
			made[dir] = true
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: 0o755, ModTime: epoch}); err != nil {
				return err
			}
		}
	}
	if from == "" {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: to[1:] + "/", Mode: 0o1777, ModTime: epoch})
	}
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if info.Mode()&0o111 != 0 {
		mode = 0o755
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: to[1:], Mode: mode, Size: info.Size(), ModTime: epoch}); err != nil {
		return err
	}
	_, err = io.Copy(w, source)
	return err
}

// packTree keeps owners, modes and links; hard links become files of their own.
func packTree(w *tar.Writer, root string) error {
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var link string
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(p); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if h.Name, err = filepath.Rel(root, p); err != nil {
			return err
		}
		if d.IsDir() {
			h.Name += "/"
		}
		if owner, ok := info.Sys().(*syscall.Stat_t); ok {
			h.Uid, h.Gid = int(owner.Uid), int(owner.Gid)
		}
		h.Uname, h.Gname, h.ModTime, h.AccessTime, h.ChangeTime = "", "", epoch, time.Time{}, time.Time{}
		if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		source, err := os.Open(p)
		if err != nil {
			return err
		}
		defer source.Close()
		_, err = io.Copy(w, source)
		return err
	})
}

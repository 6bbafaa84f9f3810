package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// workshop has a program, a tree with a link and an owner, and a place for the image.
func workshop(t *testing.T) (out string, args []string) {
	dir := t.TempDir()
	program, tree := filepath.Join(dir, "program"), filepath.Join(dir, "tree")
	for _, err := range []error{
		os.WriteFile(program, []byte("#!"), 0o700), os.MkdirAll(filepath.Join(tree, "etc"), 0o755),
		os.WriteFile(filepath.Join(tree, "etc/motd"), []byte("hello"), 0o640), os.Symlink("etc", filepath.Join(tree, "config")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	out = filepath.Join(dir, "image.tar")
	return out, []string{"-o", out, "-tag", "cove:test", "-user", "65532", "-env", "A=1", "-env", "B=2", "-entrypoint", "/cove", "-tree", tree, "-dir", "/tmp", program + "=/cove", program + "=/opt/bin/cove"}
}

func build(t *testing.T, args []string) error {
	t.Helper()
	r, err := parse(args, io.Discard)
	if err != nil {
		return err
	}
	return write(r)
}

func TestAnImage(t *testing.T) {
	out, args := workshop(t)
	if err := build(t, args); err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(out, nil)
	if err != nil {
		t.Fatal(err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c := file.Config
	if file.OS != "linux" || c.User != "65532" || !slices.Equal(c.Env, []string{"A=1", "B=2"}) || !slices.Equal(c.Entrypoint, []string{"/cove"}) {
		t.Errorf("its configuration is %+v", file)
	}
	files := map[string]*tar.Header{}
	for r := tar.NewReader(mutate.Extract(image)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = h
	}
	if h := files["cove"]; h == nil || h.Mode != 0o755 || h.Uid != 0 {
		t.Errorf("the program is %+v", h)
	}
	if h := files["opt/bin"]; h == nil || h.Mode != 0o755 || h.Typeflag != tar.TypeDir {
		t.Errorf("the directory of the other is %+v", h)
	}
	if h := files["tmp"]; h == nil || h.Mode != 0o1777 || h.Typeflag != tar.TypeDir {
		t.Errorf("/tmp is %+v", h)
	}
	if h := files["config"]; h == nil || h.Linkname != "etc" {
		t.Errorf("the link is %+v", h)
	}
	if h := files["etc/motd"]; h == nil || h.Mode&0o777 != 0o640 || h.Uid != os.Getuid() {
		t.Errorf("the file of the tree is %+v", h)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(out), ".image*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestTheSameFilesMakeTheSameImage(t *testing.T) {
	out, args := workshop(t)
	var made [2][]byte
	for i := range made {
		if err := build(t, args); err != nil {
			t.Fatal(err)
		}
		var err error
		if made[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Error("they differ")
	}
}

func TestWhatIsNoImage(t *testing.T) {
	out := filepath.Join(t.TempDir(), "image.tar")
	for name, args := range map[string][]string{
		"without a place":            {"-tag", "x:1"},
		"without a name":             {"-o", out},
		"with a name that is none":   {"-o", out, "-tag", "X Y"},
		"with a file that is none":   {"-o", out, "-tag", "x:1", "missing=/a"},
		"with a path that goes up":   {"-o", out, "-tag", "x:1", "main.go=/../a"},
		"with a relative path":       {"-o", out, "-tag", "x:1", "main.go=a"},
		"with a tree that is none":   {"-o", out, "-tag", "x:1", "-tree", "missing"},
		"with a file and no path":    {"-o", out, "-tag", "x:1", "main.go"},
		"with the root as directory": {"-o", out, "-tag", "x:1", "-dir", "/"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := build(t, args); err == nil {
				t.Error("it was made")
			}
			if _, err := os.Stat(out); err == nil {
				t.Error("something is there")
			}
		})
	}
}

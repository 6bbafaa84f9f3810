package template

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// imageUser finds the ids of a template's user in its image. Where they cannot be told they are −1: the agent, which looks
// inside, is the one who decides.
func (s *Store) imageUser(t *Template) (uid, gid int) {
	name, group, grouped := strings.Cut(t.User, ":")
	uid, gid = -1, -1
	if id, err := strconv.ParseUint(name, 10, 31); err == nil {
		uid, gid = int(id), 0 // as other runtimes have it, for one without an account
	} else if name == "root" {
		uid, gid = 0, 0
	}
	t.eachAccount("etc/passwd", func(f []string) bool {
		id, err := strconv.ParseUint(f[2], 10, 31)
		own, gerr := strconv.ParseUint(f[3], 10, 31)
		if err != nil || gerr != nil || f[0] != name && strconv.FormatUint(id, 10) != name {
			return true
		}
		uid, gid = int(id), int(own)
		return false
	})
	if !grouped || uid < 0 {
		return uid, gid
	}
	if id, err := strconv.ParseUint(group, 10, 31); err == nil {
		return uid, int(id)
	}
	gid = -1
	t.eachAccount("etc/group", func(f []string) bool {
		id, err := strconv.ParseUint(f[2], 10, 31)
		if err == nil && f[0] == group {
			gid = int(id)
		}
		return gid < 0
	})
	return uid, gid
}

// eachAccount reads a file of accounts where the uppermost layer has it. A layer was written by a stranger: no link is followed,
// only a plain file is read, and only so much of it.
func (t *Template) eachAccount(name string, f func(fields []string) bool) {
	for _, dir := range t.Trees[0].Lower {
		file, err := openPlain(filepath.Join(dir, filepath.Dir(name)), filepath.Base(name))
		if errors.Is(err, fs.ErrNotExist) && !isOpaque(filepath.Join(dir, filepath.Dir(name))) {
			continue
		}
		if err == nil { // else hidden, or a link: then it is for the agent to find
			readAccounts(file, f)
		}
		return
	}
}

func readAccounts(file *os.File, f func(fields []string) bool) {
	defer file.Close()
	lines := bufio.NewScanner(io.LimitReader(file, 4<<20))
	for lines.Scan() {
		if fields := strings.Split(lines.Text(), ":"); len(fields) >= 4 && !f(fields) {
			return
		}
	}
}

// openPlain opens a file of a directory of an image's layer; neither may be a link.
func openPlain(dir, name string) (*os.File, error) {
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, errors.New("not a directory")
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if info, err = root.Lstat(name); err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a plain file")
	}
	return root.Open(name)
}

package build

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// The files that say who lives in a sandbox.
const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"
	shadowFile = "/etc/shadow"
)

// maxAccounts bounds what is read of such a file; the agent reads no more of them either.
const maxAccounts = 4 << 20

// maxID is the last number that somebody in a sandbox can have.
const maxID = 65535

// skeleton gives a new home what shells look for there.
const skeleton = `[ ! -d /etc/skel ] || { cp -a /etc/skel/. "$1" && chown -R "$2" "$1"; }`

// hasUser tells whether somebody exists in the sandbox.
func (s *site) hasUser(ctx context.Context, name string) (bool, error) {
	if name == "" { // the sandbox's own user
		return true, nil
	}
	if !userForm.MatchString(name) {
		return false, nil
	}
	_, err := s.agent.Account(ctx, agentapi.AccountParams{User: name})
	if fault.Is(err, fault.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// makeUser makes a user with a group, a home and a shell, if there is none of that name. It does not ask useradd, which not
// every template has, and which gives up where the host's kernel keeps its audit log to itself. The ids are the first free
// ones from id on.
func (s *site) makeUser(ctx context.Context, name string, id int) error {
	users, err := s.accounts(ctx, passwdFile, name)
	if err != nil || users.named || strings.Trim(name, "0123456789") == "" { // a number needs no name
		return err
	}
	groups, err := s.accounts(ctx, groupFile, name)
	if err != nil {
		return err
	}
	for users.taken[id] || groups.taken[id] {
		id++
	}
	if id > maxID {
		return fault.New(fault.Invalid, "all numbers of users are taken in the image")
	}
	gid := strconv.Itoa(id)
	if groups.named {
		gid = groups.id
	} else if err := s.enter(ctx, groupFile, fmt.Sprintf("%s:x:%s:", name, gid)); err != nil {
		return err
	}
	shell, err := s.shellPath(ctx)
	if err != nil {
		return err
	}
	home := "/home/" + name
	if err := s.enter(ctx, passwdFile, fmt.Sprintf("%s:x:%d:%s::%s:%s", name, id, gid, home, shell)); err != nil {
		return err
	}
	if err := s.enter(ctx, shadowFile, name+":*:19000:0:99999:7:::"); err != nil {
		return err
	}
	return s.makeHome(ctx, name, home, fmt.Sprintf("%d:%s", id, gid))
}

// makeHome makes the home of a new user. One that is there stays as it is.
func (s *site) makeHome(ctx context.Context, name, home, ids string) error {
	if err := s.makeDir(ctx, "/home", "root"); err != nil {
		return err
	}
	_, err := s.agent.Mkdir(ctx, agentapi.MkdirParams{Path: home, User: name, Root: true})
	if fault.Is(err, fault.Conflict) {
		return nil
	}
	if err != nil {
		return err
	}
	if shell, err := s.shellPath(ctx); shell == "" || err != nil {
		return err
	}
	return s.root(ctx, nil, skeleton, home, ids)
}

// accounts is what matters of /etc/passwd or /etc/group: the image's own text, of which there may be much.
type accounts struct {
	named bool
	id    string // of the one that is named
	taken map[int]bool
}

// accounts reads such a file, and looks for somebody in it; one that is not there is empty.
func (s *site) accounts(ctx context.Context, path, name string) (a accounts, err error) {
	a.taken = map[int]bool{}
	text, err := s.text(ctx, path)
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 4)
		if len(fields) < 3 {
			continue
		}
		if id, err := strconv.Atoi(fields[2]); err == nil && id >= 0 && id <= maxID {
			a.taken[id] = true
		}
		if fields[0] == name && !a.named {
			a.named, a.id = true, fields[2]
		}
	}
	return a, err
}

// enter adds a line to such a file.
func (s *site) enter(ctx context.Context, path, line string) error {
	text, err := s.text(ctx, path)
	if err != nil {
		return err
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		line = "\n" + line
	}
	_, err = s.agent.Write(ctx, agentapi.WriteParams{Path: path, User: "root", Append: true}, strings.NewReader(line+"\n"))
	return err
}

func (s *site) text(ctx context.Context, path string) (string, error) {
	_, r, err := s.agent.Read(ctx, agentapi.ReadParams{Path: path, User: "root", Length: maxAccounts + 1})
	if fault.Is(err, fault.NotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(io.LimitReader(r, maxAccounts+1)) // the agent may have been taken over
	if err == nil && len(text) > maxAccounts {
		err = fault.New(fault.Invalid, "%s of the image has more than %d bytes", path, maxAccounts)
	}
	return string(text), err
}

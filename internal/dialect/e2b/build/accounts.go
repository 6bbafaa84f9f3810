package build

import (
	"context"
	"fmt"
	"io"
	"slices"
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
	users, err := s.accounts(ctx, passwdFile)
	if err != nil || users.named(name) != nil || strings.Trim(name, "0123456789") == "" { // a number needs no name
		return err
	}
	groups, err := s.accounts(ctx, groupFile)
	if err != nil {
		return err
	}
	for users.taken(id) || groups.taken(id) {
		id++
	}
	gid := strconv.Itoa(id)
	if group := groups.named(name); group != nil {
		gid = group[2]
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

// accounts are the lines of /etc/passwd or /etc/group, by fields.
type accounts [][]string

// accounts reads such a file; one that is not there is empty.
func (s *site) accounts(ctx context.Context, path string) (all accounts, err error) {
	text, err := s.text(ctx, path)
	for line := range strings.Lines(text) {
		if fields := strings.Split(strings.TrimSpace(line), ":"); len(fields) > 2 {
			all = append(all, fields)
		}
	}
	return all, err
}

func (a accounts) named(name string) []string {
	if i := slices.IndexFunc(a, func(f []string) bool { return f[0] == name }); i >= 0 {
		return a[i]
	}
	return nil
}

func (a accounts) taken(id int) bool {
	return slices.ContainsFunc(a, func(f []string) bool { return f[2] == strconv.Itoa(id) })
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
	_, r, err := s.agent.Read(ctx, agentapi.ReadParams{Path: path, User: "root", Length: maxAccounts})
	if fault.Is(err, fault.NotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	return string(text), err
}

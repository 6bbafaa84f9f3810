package envd

import (
	"context"
	"errors"
	"net/http"
	"path"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
)

// place is where a request acts: the sandbox's agent, and the user whom the caller has named.
type place struct {
	*agentapi.Client
	user    string // empty: the sandbox's default
	account *agentapi.Account
}

// errUser is a user that there is not.
type errUser string

func (e errUser) Error() string { return "invalid username: '" + string(e) + "'" }

// at finds the place of a request; a name that is no user's is an errUser.
func (h *Handler) at(ctx context.Context, user string) (*place, error) {
	t := target.From(ctx)
	agent, err := h.sandboxes.Agent(ctx, t.Who, t.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	p := &place{Client: agent, user: user}
	if user == "" {
		return p, nil
	}
	if _, err := strconv.Atoi(user); err == nil { // the agent knows users by number too, E2B does not
		return nil, errUser(user)
	}
	if _, err := p.who(ctx); fault.Is(err, fault.NotFound) {
		return nil, errUser(user)
	} else if err != nil {
		return nil, err
	}
	return p, nil
}

// rpc is the place of a Connect request.
func (h *Handler) rpc(ctx context.Context, header http.Header) (*place, error) {
	p, err := h.at(ctx, basicUser(header))
	var unknown errUser
	if errors.As(err, &unknown) {
		return nil, connect.NewError(connect.CodeUnauthenticated, unknown)
	}
	if err != nil {
		return nil, h.failed(ctx, err)
	}
	return p, nil
}

// basicUser is the name in a Basic Authorization header; there is no password.
func basicUser(header http.Header) string {
	name, _, _ := (&http.Request{Header: header}).BasicAuth()
	return name
}

func (p *place) who(ctx context.Context) (*agentapi.Account, error) {
	if p.account == nil {
		who, err := p.Account(ctx, agentapi.AccountParams{User: p.user})
		if err != nil {
			return nil, err
		}
		p.account = &who
	}
	return p.account, nil
}

// resolve makes a path absolute: nothing is the working directory, "~" the user's home, and relative ones start there.
func (p *place) resolve(ctx context.Context, name string) (string, error) {
	if strings.HasPrefix(name, "/") {
		return path.Clean(name), nil
	}
	who, err := p.who(ctx)
	if err != nil {
		return "", err
	}
	home := "/" + who.Home
	switch rest, tilde := strings.CutPrefix(name, "~"); {
	case name == "":
		return path.Clean("/" + who.Workdir), nil
	case tilde && rest != "" && rest[0] != '/':
		return "", fault.New(fault.Invalid, "cannot expand user-specific home dir")
	case tilde:
		return path.Join(home, rest), nil
	}
	return path.Join(home, name), nil
}

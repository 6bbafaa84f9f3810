package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/covehq/cove/client"
)

// dockerHub is the registry of names without a host.
const dockerHub = "docker.io"

func (a *invocation) login() *cobra.Command {
	var user string
	var stdin, list bool
	c := &cobra.Command{
		Use:   "login [REGISTRY]",
		Short: "Log in to a registry of container images",
		Long: "Keep a user name and password for a registry, docker.io unless another is named, so that images can be pulled that it\n" +
			"does not give to everybody. The server asks the registry whether they are right and keeps them encrypted, for your\n" +
			"tenant alone. The password is asked for, or read from standard input; it is no argument, which others could see.",
		Example: "  cove login ghcr.io -u alice\n  pass show registry | cove login registry.example.com -u ci --password-stdin\n  cove login --list",
		Args:    maxArgs(1, "one registry"),
		RunE: func(c *cobra.Command, args []string) error {
			registry := cmp.Or(strings.Join(args, ""), dockerHub)
			if list {
				return a.listLogins(c)
			}
			req := client.LoginRequest{Registry: registry, Username: user}
			var err error
			if req.Username, req.Password, err = a.credentials(registry, user, stdin); err != nil {
				return err
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			done := a.working(still("asking %s", registry))
			err = cl.Login(c.Context(), req)
			done()
			if err != nil {
				return err
			}
			return a.print(map[string]string{"registry": registry, "username": req.Username}, func(t *table) {
				t.row("logged in to " + registry + " as " + req.Username)
			})
		},
	}
	f := c.Flags()
	f.StringVarP(&user, "username", "u", "", "user `name`; asked for when it is not given")
	f.BoolVar(&stdin, "password-stdin", false, "read the password from standard input")
	f.BoolVar(&list, "list", false, "list where you are logged in")
	completeFlag(c, "username", cobra.NoFileCompletions)
	return c
}

func (a *invocation) listLogins(c *cobra.Command) error {
	cl, err := a.connect(c.Context())
	if err != nil {
		return err
	}
	list, err := cl.Registries(c.Context())
	if err != nil {
		return err
	}
	return a.print(list, func(t *table) {
		for _, r := range list {
			t.row(r)
		}
	})
}

// credentials are asked for on a terminal; a password never echoes.
func (a *invocation) credentials(registry, user string, stdin bool) (name, password string, err error) {
	f, typed := terminal(a.In)
	switch {
	case stdin && user == "":
		return "", "", usageError{errors.New("--password-stdin wants the user name too: -u NAME")}
	case stdin:
		b, err := io.ReadAll(io.LimitReader(a.In, 64<<10))
		password = strings.TrimRight(string(b), "\r\n")
		if err == nil && password == "" {
			err = usageError{errors.New("standard input holds no password")}
		}
		return user, password, err
	case !typed:
		return "", "", usageError{errors.New("standard input is not a terminal; give the password with --password-stdin")}
	}
	if user == "" {
		fmt.Fprintf(a.Err, "User name for %s: ", registry)
		line, err := bufio.NewReader(f).ReadString('\n')
		if user = strings.TrimSpace(line); err != nil || user == "" {
			return "", "", usageError{errors.New("a login needs a user name")}
		}
	}
	fmt.Fprintf(a.Err, "Password of %s for %s: ", user, registry)
	b, err := term.ReadPassword(int(f.Fd()))
	fmt.Fprintln(a.Err)
	if err == nil && len(b) == 0 {
		err = usageError{errors.New("a login needs a password")}
	}
	return user, string(b), err
}

func (a *invocation) logout() *cobra.Command {
	return &cobra.Command{
		Use: "logout [REGISTRY]", Short: "Forget the password for a registry",
		Long: "Forget the user name and password for a registry, docker.io unless another is named.",
		Args: maxArgs(1, "one registry"),
		ValidArgsFunction: func(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return a.complete(c, begun, func(ctx context.Context, cl *client.Client) ([]string, error) { return cl.Registries(ctx) })
		},
		RunE: func(c *cobra.Command, args []string) error {
			registry := cmp.Or(strings.Join(args, ""), dockerHub)
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach([]string{registry}, func(name string) error { return cl.Logout(c.Context(), name) })
		},
	}
}

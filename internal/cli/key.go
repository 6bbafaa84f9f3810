package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) key() *cobra.Command {
	c := &cobra.Command{Use: "key", Short: "Make, list and revoke API keys"}
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usageError{fmt.Errorf("unknown command %q for %q; see `cove key --help`", args[0], "cove key")}
		}
		return c.Help()
	}
	c.AddCommand(a.keyCreate(), a.keyList(), a.keyRevoke())
	return c
}

func (a *invocation) keyCreate() *cobra.Command {
	var req client.KeyRequest
	c := &cobra.Command{
		Use: "create", Short: "Make an API key; it is shown this once", Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			k, err := cl.CreateKey(c.Context(), req)
			if err != nil {
				return err
			}
			return a.print(k, func(w io.Writer) {
				fmt.Fprintln(w, k.Secret)
				fmt.Fprintf(a.Err, "key %s of tenant %s; it is not shown again\n", k.ID, k.Tenant)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&req.Name, "name", "", "a `name` to remember it by")
	f.StringVar(&req.Tenant, "tenant", "", "`tenant` that the key acts for; default is your own")
	f.BoolVar(&req.Admin, "admin", false, "the key may manage keys")
	return c
}

func (a *invocation) keyList() *cobra.Command {
	var tenant string
	c := &cobra.Command{
		Use: "list", Short: "List API keys", Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			keys, err := cl.Keys(c.Context(), tenant)
			if err != nil {
				return err
			}
			return a.print(keys, func(w io.Writer) { keyTable(w, keys, time.Now()) })
		},
	}
	c.Flags().StringVar(&tenant, "tenant", "", "another `tenant`")
	return c
}

func keyTable(w io.Writer, keys []client.Key, now time.Time) {
	fmt.Fprintln(w, "ID\tKEY\tNAME\tTENANT\tADMIN\tAGE\tSTATE")
	for _, k := range keys {
		state, admin := "valid", "no"
		if !k.RevokedAt.IsZero() {
			state = "revoked"
		}
		if k.Admin {
			admin = "yes"
		}
		fmt.Fprintf(w, "%s\t%s…\t%s\t%s\t%s\t%s\t%s\n", k.ID, k.Prefix, k.Name, k.Tenant, admin, short(now.Sub(k.CreatedAt)), state)
	}
}

func (a *invocation) keyRevoke() *cobra.Command {
	var tenant string
	c := &cobra.Command{
		Use: "revoke ID", Short: "Revoke an API key", Args: exactArgs(1, "the id of a key, from `cove key list`"),
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			if err := cl.RevokeKey(c.Context(), tenant, args[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"revoked": args[0]}, func(w io.Writer) { fmt.Fprintln(w, args[0]) })
		},
	}
	c.Flags().StringVar(&tenant, "tenant", "", "another `tenant`")
	return c
}

package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) key() *cobra.Command {
	return family("key", "Make, list and revoke API keys", a.keyCreate(), a.keyList(), a.keyRevoke())
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
			return a.print(k, func(t *table) {
				t.row(k.Secret)
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
	var quiet bool
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
			return a.print(keys, func(t *table) { keyTable(t, keys, quiet, time.Now()) })
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	c.Flags().StringVar(&tenant, "tenant", "", "another `tenant`")
	return c
}

func keyTable(t *table, keys []client.Key, quiet bool, now time.Time) {
	if !quiet {
		t.head("ID", "KEY", "NAME", "TENANT", "ADMIN", "CREATED", "LAST USED", "STATE")
	}
	for _, k := range keys {
		if quiet {
			t.row(k.ID)
			continue
		}
		state, admin := cell{"valid", green}, "no"
		if !k.RevokedAt.IsZero() {
			state = cell{"revoked", dim}
		}
		if k.Admin {
			admin = "yes"
		}
		t.row(k.ID, k.Prefix+"…", k.Name, k.Tenant, admin, ago(k.CreatedAt, now), ago(k.LastUsed, now), state)
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
			return a.print(map[string]string{"revoked": args[0]}, func(t *table) { t.row(args[0]) })
		},
	}
	c.Flags().StringVar(&tenant, "tenant", "", "another `tenant`")
	return c
}

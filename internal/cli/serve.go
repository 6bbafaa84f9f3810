package cli

import (
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/internal/app"
)

func (a *invocation) serve() *cobra.Command {
	c := &cobra.Command{
		Use:   "serve",
		Short: "Start the server",
		Long: "Start the server and print what to paste next.\n\n" +
			"The first start makes an admin API key: it is kept in DATA/server/api_key (mode 0600) for the commands on this\n" +
			"machine, and printed once where standard output is a terminal. DATA/server/server.json tells them where the server is. One server runs on a data directory at a time.\n\n" +
			"With --domain the server also speaks TLS, and every port of a sandbox has a host name: 3000-SANDBOX.NAME. NAME and\n" +
			"everything below it must lead to this machine. Without --tls-cert the server makes an authority of its own at the first\n" +
			"start, good for that name only, and prints how to trust it.",
		Args: exactArgs(0, "no arguments"),
	}
	f := c.Flags()
	f.String("listen", "", "`address` HOST:PORT; port 0 picks one; default 127.0.0.1:8080 (COVE_LISTEN)")
	f.Bool("insecure-http", false, "let other machines speak plain HTTP: their keys pass the network unencrypted (COVE_SERVER_INSECURE_HTTP)")
	f.String("domain", "", "serve TLS too, with a `name` for each port: https://PORT-SANDBOX.NAME (COVE_TLS_DOMAIN)")
	f.String("tls-listen", "", "`address` HOST:PORT of TLS, or off where a proxy in front speaks it; default: port 7443 of the host of --listen (COVE_TLS_LISTEN)")
	f.String("tls-cert", "", "`file` with a certificate for NAME and *.NAME; default: one of the server's own making (COVE_TLS_CERT)")
	f.String("tls-key", "", "`file` with its key (COVE_TLS_KEY)")
	f.String("ready-file", "", "write this `file` as JSON (url, api_key, pid; domain and ca_file with --domain) once the server can serve")
	f.Bool("anonymous", false, "let everybody on this machine in without a key (COVE_AUTH_ANONYMOUS)")
	f.Bool("anonymous-everywhere", false, "with --anonymous, let in those of other machines too: whoever reaches the address may run anything (COVE_AUTH_ANONYMOUS_EVERYWHERE)")
	f.String("driver", "", "`name`: native; inproc isolates nothing and is for tests (COVE_DRIVER)")
	f.String("log-level", "", "`level`: debug, info, warn or error")
	f.String("log-format", "", "`format`: text or json")
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := a.load(changed(c, map[string]string{
			"listen": "listen", "insecure-http": "server.insecure_http", "domain": "tls.domain", "tls-listen": "tls.listen", "tls-cert": "tls.cert", "tls-key": "tls.key", "ready-file": "ready_file",
			"anonymous": "auth.anonymous", "anonymous-everywhere": "auth.anonymous_everywhere", "driver": "driver", "log-level": "log.level", "log-format": "log.format",
		}))
		if err != nil {
			return usageError{err}
		}
		ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		_, shown := terminal(a.Out)
		return app.Run(ctx, cfg, a.Out, a.Err, shown)
	}
	return c
}

// changed are the settings that the command line gave, by their dotted name.
func changed(c *cobra.Command, settings map[string]string) map[string]string {
	given := map[string]string{}
	for flag, setting := range settings {
		if f := c.Flags().Lookup(flag); f.Changed {
			given[setting] = f.Value.String()
		}
	}
	return given
}

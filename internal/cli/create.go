package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/config"
)

// sandboxFlags are what every command that makes a sandbox can be told about it.
type sandboxFlags struct {
	template, image       string
	net, storage          string
	memory, disk          string
	cpus                  float64
	pids, openFiles       int
	env, metadata, mounts []string
}

// sandboxFlagNames are those that only the making of a sandbox can follow; --env means something to a command too.
var sandboxFlagNames = []string{"template", "image", "memory", "cpus", "disk", "pids", "open-files", "net", "storage", "metadata", "mount"}

func (f *sandboxFlags) register(a *invocation, c *cobra.Command) {
	fs := c.Flags()
	fs.StringVar(&f.template, "template", "", "`name` of what the sandbox starts from; default is the server's")
	fs.StringVar(&f.image, "image", "", "container `image` that the sandbox starts from instead; it is pulled when it is not here")
	fs.StringVar(&f.memory, "memory", "", "memory of the sandbox: a `size` such as 512M")
	fs.Float64Var(&f.cpus, "cpus", 0, "CPUs of the sandbox: a `number` such as 0.5")
	fs.StringVar(&f.disk, "disk", "", "disk of the sandbox: a `size` such as 2G")
	fs.IntVar(&f.pids, "pids", 0, "`number` of processes and threads in the sandbox")
	fs.IntVar(&f.openFiles, "open-files", 0, "`number` of files that a process may have open")
	fs.StringVar(&f.net, "net", "", "internet, none, or a `list` of IPv4 prefixes: 203.0.113.0/24,198.51.100.7")
	fs.StringVar(&f.storage, "storage", "", "`kind`: volatile, durable (fsync means it) or tmpfs (in memory)")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for the environment; may be repeated")
	fs.StringArrayVarP(&f.metadata, "metadata", "m", nil, "`NAME=VALUE` to find the sandbox by; may be repeated")
	fs.StringArrayVarP(&f.mounts, "mount", "v", nil, "`SOURCE:TARGET[:ro|:rw]`: a volume (NAME or NAME/PATH; made when it is not there) or a path of the server's host\n(read-only without :rw) that is seen in the sandbox; may be repeated")
	completeFlag(c, "template", a.completeTemplates)
	completeFlag(c, "image", a.completeImages)
	completeFlag(c, "net", words("internet", "none"))
	completeFlag(c, "storage", words("volatile", "durable", "tmpfs"))
	for _, name := range []string{"memory", "cpus", "disk", "pids", "open-files", "env", "metadata", "mount"} {
		completeFlag(c, name, cobra.NoFileCompletions)
	}
}

// request is what the flags ask for; what is wrong with them is the caller's usage.
func (f *sandboxFlags) request() (client.CreateRequest, error) {
	req := client.CreateRequest{Template: f.template, Image: f.image, Network: network(f.net), Storage: f.storage}
	if f.template != "" && f.image != "" {
		return req, usageError{errors.New("a sandbox starts from either --template or --image")}
	}
	limits := client.Limits{CPUs: f.cpus, Pids: f.pids, OpenFiles: f.openFiles}
	for _, s := range []struct {
		flag, text string
		bytes      *int64
	}{{"--memory", f.memory, &limits.MemoryBytes}, {"--disk", f.disk, &limits.DiskBytes}} {
		if s.text == "" {
			continue
		}
		n, err := config.ParseSize(s.text)
		if err != nil {
			return req, usageError{fmt.Errorf("%s: %w", s.flag, err)}
		}
		*s.bytes = int64(n)
	}
	if limits != (client.Limits{}) {
		req.Limits = &limits
	}
	var err error
	if req.Mounts, err = mounts(f.mounts); err != nil {
		return req, err
	}
	if req.Env, err = pairs("--env", f.env); err != nil {
		return req, err
	}
	req.Metadata, err = pairs("--metadata", f.metadata)
	return req, err
}

// network reads --net; what is neither mode is a list, and the server says what is wrong with it.
func network(text string) *client.Network {
	switch text {
	case "":
		return nil
	case "internet", "none":
		return &client.Network{Mode: text}
	}
	return &client.Network{Mode: "list", Allow: strings.Split(text, ",")}
}

// pairs reads a flag that is given as NAME=VALUE, perhaps several times.
func pairs(flag string, given []string) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	all := map[string]string{}
	for _, pair := range given {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, usageError{fmt.Errorf("%s %q: want NAME=VALUE", flag, pair)}
		}
		all[name] = value
	}
	return all, nil
}

// lifetime is a flag for how long something lives: a duration, or "never" for no end where the server allows it.
type lifetime float64

const forever = lifetime(-1)

func (l *lifetime) Set(text string) error {
	d, err := parseLifetime(text)
	*l = d
	return err
}

func parseLifetime(text string) (lifetime, error) {
	if text == "never" {
		return forever, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("%q is not a duration: write it as 90s, 5m or 2h, or never", text)
	}
	return lifetime(d.Seconds()), nil
}

func (l *lifetime) String() string {
	switch *l {
	case 0:
		return ""
	case forever:
		return "never"
	}
	return time.Duration(float64(*l) * float64(time.Second)).String()
}

func (l *lifetime) Type() string { return "duration" }

func (l *lifetime) register(c *cobra.Command, name, about string) {
	c.Flags().Var(l, name, about+", such as 1h, or never; default is the server's")
	completeFlag(c, name, cobra.NoFileCompletions)
}

func (a *invocation) create() *cobra.Command {
	var f sandboxFlags
	var timeout, idle lifetime
	var key, idleAction string
	var autoResume, start bool
	c := &cobra.Command{
		Use:   "create",
		Short: "Make a sandbox and print its id",
		Long: "Make a sandbox that takes code and commands at once, and print its id. It lives until `cove kill`, until its timeout\n" +
			"has passed or until nobody used it for its idle timeout, which may also only pause it. With --key a living sandbox of\n" +
			"yours with the same key is found instead.",
		Example: "  id=$(cove create --timeout 1h --memory 1G)\n  cove create --image debian:13-slim -v scratch:/data\n  cove create --key alice --idle-timeout 10m --idle-action pause --auto-resume",
		Args:    exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			req, err := f.request()
			if err != nil {
				return err
			}
			req.Key, req.TimeoutSeconds, req.IdleTimeoutSeconds = key, float64(timeout), float64(idle)
			req.IdleAction, req.AutoResume, req.Start = idleAction, autoResume, start
			if start && req.Image == "" {
				return usageError{errors.New("--start is about what an image would start: give --image")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			sb, err := a.makeSandbox(c.Context(), cl, req)
			if err != nil {
				return err
			}
			return a.print(sb.SandboxInfo, func(t *table) { t.row(sb.ID) })
		},
	}
	f.register(a, c)
	timeout.register(c, "timeout", "how long the sandbox lives")
	idle.register(c, "idle-timeout", "after how long without use it ends")
	fs := c.Flags()
	fs.StringVar(&idleAction, "idle-action", "", "`what` happens after the idle timeout: kill or pause")
	fs.BoolVar(&autoResume, "auto-resume", false, "any use resumes the sandbox while it is paused")
	fs.BoolVar(&start, "start", false, "begin with what the image itself would start, as a process in the background")
	fs.StringVar(&key, "key", "", "a `name` of yours: a living sandbox with the same key is returned instead")
	completeFlag(c, "idle-action", words("kill", "pause"))
	completeFlag(c, "key", cobra.NoFileCompletions)
	return c
}

func (a *invocation) makeSandbox(ctx context.Context, c *client.Client, req client.CreateRequest) (*client.Sandbox, error) {
	if req.Image != "" { // with progress, which making a sandbox has none of
		if _, err := a.pull(ctx, c, client.PullRequest{Reference: req.Image, IfMissing: true}); err != nil {
			return nil, err
		}
	}
	defer a.working(still("making a sandbox"))()
	return c.Create(ctx, req)
}

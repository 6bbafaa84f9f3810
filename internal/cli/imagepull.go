package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
)

func (a *invocation) imagePull() *cobra.Command {
	var req client.PullRequest
	c := &cobra.Command{
		Use:   "pull NAME",
		Short: "Get an image from its registry",
		Long: "Get an image from its registry, or what is new of it: layers that are here already are not fetched again. A name without a\n" +
			"host is one of docker.io. `cove create --image NAME` pulls by itself what is not here.",
		Example: "  cove image pull debian:13-slim\n  cove image pull ghcr.io/owner/name@sha256:…",
		Args:    exactArgs(1, "the name of an image"),
		RunE: func(c *cobra.Command, args []string) error {
			req.Reference = args[0]
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			info, err := a.pull(c.Context(), cl, req)
			if err != nil {
				return err
			}
			return a.print(info, func(t *table) { t.row(familiar(info.Reference)) })
		},
	}
	c.Flags().StringVar(&req.Platform, "platform", "", "`os/arch` that the image must have; only the server's own is possible")
	completeFlag(c, "platform", words("linux/amd64", "linux/arm64"))
	return c
}

// interruptible ends with Ctrl-C, so that what is on the terminal and on the server can be cleared away first.
func interruptible(ctx context.Context) (context.Context, func()) {
	return signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
}

// interrupted is the exit code for whoever pressed Ctrl-C, and otherwise the failure itself.
func interrupted(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return exit(exitInterrupted)
	}
	return err
}

// pull gets an image and shows how far it is.
func (a *invocation) pull(ctx context.Context, c *client.Client, req client.PullRequest) (*client.ImageInfo, error) {
	ctx, stop := interruptible(ctx)
	defer stop()
	progress := a.pullProgress(req.Reference)
	info, err := c.PullImage(ctx, req, progress.add)
	progress.end()
	return info, interrupted(ctx, err)
}

// pullProgress shows a pull on standard error: on a terminal each layer with a bar, and nothing of it stays; elsewhere a line
// for each thing that happens.
type pullProgress struct {
	a     *invocation
	what  string
	f     *os.File // nil: no terminal
	begun time.Time

	stop, ended chan struct{}

	mu     sync.Mutex
	order  []string
	layers map[string]client.PullEvent
}

func (a *invocation) pullProgress(what string) *pullProgress {
	p := &pullProgress{a: a, what: what, begun: time.Now(), layers: map[string]client.PullEvent{}, stop: make(chan struct{}), ended: make(chan struct{})}
	if f, live := terminal(a.Err); live {
		p.f = f
		go p.show()
	} else {
		close(p.ended)
	}
	return p
}

// end takes what was shown away.
func (p *pullProgress) end() {
	close(p.stop)
	<-p.ended
}

func (p *pullProgress) add(e client.PullEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old, known := p.layers[e.Layer]
	if !known {
		p.order = append(p.order, e.Layer)
	}
	p.layers[e.Layer] = e
	if p.f == nil && (!known || old.Step != e.Step) {
		fmt.Fprintln(p.a.Err, plainPull(p.what, e))
	}
}

// plainPull is a thing that happens in a pull, as a line.
func plainPull(what string, e client.PullEvent) string {
	line := what + ": " + stepWords[e.Step]
	if e.Layer != "" {
		line = what + ": layer " + shortDigest(e.Layer) + ": " + stepWords[e.Step]
	}
	if e.Total > 0 && e.Step == "download" {
		line += ", " + size(e.Total)
	}
	return line
}

var stepWords = map[string]string{"resolve": "asking the registry", "download": "downloading", "unpack": "unpacking", "known": "is here already", "done": "done"}

func (p *pullProgress) show() {
	defer close(p.ended)
	select { // what is here already needs no screen
	case <-p.stop:
		return
	case <-time.After(2 * frame):
	}
	s := openScreen(p.f, false)
	defer s.close()
	tick := time.NewTicker(frame)
	defer tick.Stop()
	for {
		s.draw(func(size client.PTYSize) []string { return p.lines(int(size.Cols)) })
		select {
		case <-p.stop:
			s.draw(func(client.PTYSize) []string { return nil })
			return
		case <-tick.C:
		}
	}
}

// lines is the pull as it stands.
func (p *pullProgress) lines(width int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := &table{}
	colour := inColour(p.f)
	ready, layers := 0, 0
	for _, name := range p.order {
		e := p.layers[name]
		if name == "" {
			continue
		}
		layers++
		if e.Step == "done" || e.Step == "known" {
			ready++
		}
		t.row(cell{shortDigest(name), dim}, layerCell(e), layerBar(e))
	}
	head := fmt.Sprintf("%s: %s", p.what, cmp.Or(stepWords[p.layers[""].Step], stepWords["resolve"]))
	if layers > 0 {
		head = fmt.Sprintf("%s: %s done, %d on their way", p.what, count(ready, "layer", "layers"), layers-ready)
	}
	head += " (" + short(time.Since(p.begun)) + ")"
	return append([]string{paint(cut(head, width-1), bold, colour)}, t.lines(width-1, colour)...)
}

func layerCell(e client.PullEvent) cell {
	switch e.Step {
	case "done":
		return cell{"done", green}
	case "known":
		return cell{"here already", green}
	}
	return cell{stepWords[e.Step], cyan}
}

func layerBar(e client.PullEvent) string {
	switch {
	case e.Step == "done" || e.Step == "known":
		if e.Total > 0 {
			return size(e.Total)
		}
		return ""
	case e.Total > 0:
		return bar(e.Done, e.Total) + " " + size(e.Done) + " of " + size(e.Total)
	case e.Done > 0:
		return size(e.Done)
	}
	return ""
}

func (a *invocation) imageImport() *cobra.Command {
	c := &cobra.Command{
		Use:   "import FILE|- [NAME]",
		Short: "Make an image of an archive",
		Long: "Make an image of an archive: what `docker save` or `podman save` writes, an OCI layout as a tar, or a tar of a root\n" +
			"directory, which then needs a name. Each may be compressed with gzip or zstd. - reads standard input.",
		Example: "  docker save myapp | cove image import -\n  cove image import debian-rootfs.tar.gz debian:mine",
		Args:    between(1, 2, "an archive, and a name where it has none"),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
		RunE: func(c *cobra.Command, args []string) error {
			archive, total, err := a.archive(args[0])
			if err != nil {
				return err
			}
			defer archive.Close()
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			ctx, stop := interruptible(c.Context())
			defer stop()
			m := &meter{Reader: archive, total: total}
			done := a.working(m.importProgress())
			list, err := cl.ImportImage(ctx, strings.Join(args[1:], ""), m)
			done()
			if err != nil {
				return interrupted(ctx, err)
			}
			return a.print(list, func(t *table) {
				for i := range list {
					t.row(familiar(list[i].Reference))
				}
			})
		},
	}
	return c
}

// importProgress says how much of an archive is sent, and then that it is unpacked.
func (m *meter) importProgress() func() string {
	sending := m.progress("sending the archive")
	return func() string {
		if m.total > 0 && m.done.Load() >= m.total {
			return "unpacking " + size(m.total)
		}
		return sending()
	}
}

// archive is a file, or standard input; total is zero where nobody knows.
func (a *invocation) archive(name string) (r io.ReadCloser, total int64, err error) {
	if name == "-" {
		if _, ok := terminal(a.In); ok {
			return nil, 0, usageError{fmt.Errorf("standard input is a terminal; pipe an archive into it or name a file")}
		}
		return io.NopCloser(a.In), 0, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = fmt.Errorf("%s is a directory; pack it first: tar -C %[1]s -c . | cove image import - NAME", name)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

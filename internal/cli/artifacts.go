package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) artifacts() *cobra.Command {
	c := family("artifacts", "Files that sessions left, and where they came from",
		a.artifactsList(), a.artifactsShow(), a.artifactsGet(), a.artifactsOpen(), a.artifactsLink(), a.artifactsRemove())
	c.Aliases = []string{"artifact"}
	return c
}

// mostListed is how many artifacts a listing shows unless more are asked for.
const mostListed = 50

func (a *invocation) artifactsList() *cobra.Command {
	var req client.ArtifactsRequest
	var most int
	var quiet bool
	c := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List artifacts, newest first",
		Example: "  cove artifacts list --session chat-7\n  cove artifacts list --json | jq -r '.[].url'",
		Args:    exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			if most < 0 {
				return usageError{errors.New("--limit: how many, 0 for all of them")}
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list, more, err := someArtifacts(c.Context(), cl, req, most)
			if err != nil {
				return err
			}
			if len(list) == 0 && !a.json && !quiet {
				fmt.Fprintln(a.Err, "no artifacts; files that a session's code puts into /session/artifacts become some")
				return nil
			}
			err = a.print(list, func(t *table) { artifactTable(t, list, quiet, time.Now()) })
			if more && !a.json && !quiet {
				fmt.Fprintln(a.Err, "there are more: --limit 0 lists all of them")
			}
			return err
		},
	}
	c.Flags().StringVar(&req.Session, "session", "", "only of the session with this `key`")
	c.Flags().StringVar(&req.Run, "run", "", "only of this `run`")
	c.Flags().IntVarP(&most, "limit", "n", mostListed, "how many: a `number`, 0 for all of them")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return c
}

// someArtifacts are at most so many, and whether there are more; 0 is all.
func someArtifacts(ctx context.Context, cl *client.Client, req client.ArtifactsRequest, most int) (list []client.Artifact, more bool, err error) {
	list = []client.Artifact{}
	for art, err := range cl.Artifacts(ctx, req) {
		if err != nil {
			return nil, false, err
		}
		if most > 0 && len(list) == most {
			return list, true, nil
		}
		list = append(list, art)
	}
	return list, false, nil
}

func artifactTable(t *table, list []client.Artifact, quiet bool, now time.Time) {
	if !quiet {
		t.head("ID", "NAME", ">SIZE", "TYPE", "SESSION", "RUN", "CREATED")
	}
	for _, art := range list {
		if quiet {
			t.row(art.ID)
			continue
		}
		t.row(art.ID, cut(clean(art.Path), 40), size(art.Size), art.MIME, orDash(art.Session), orDash(art.Run), ago(art.CreatedAt, now))
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func (a *invocation) artifactsShow() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Tell which cell made an artifact, and from what",
		Args: exactArgs(1, "the id of an artifact"), ValidArgsFunction: a.completeArtifacts(1),
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			l, err := cl.ArtifactLineage(c.Context(), args[0])
			if err != nil {
				return err
			}
			return a.print(l, func(t *table) { lineageTable(t, l, time.Now()) })
		},
	}
}

func lineageTable(t *table, l *client.ArtifactLineage, now time.Time) {
	art := &l.Artifact
	row := func(name string, value any) { t.row(cell{name, dim}, value) }
	row("id", art.ID)
	row("name", art.Name)
	row("path", art.Path)
	row("type", art.MIME)
	row("size", fmt.Sprintf("%s (%d bytes)", size(art.Size), art.Size))
	row("sha256", art.SHA256)
	row("created", ago(art.CreatedAt, now))
	if !art.ExpiresAt.IsZero() {
		row("removed in", short(art.ExpiresAt.Sub(now)))
	}
	for _, f := range []struct{ name, value string }{{"session", art.Session}, {"sandbox", art.Sandbox}, {"run", art.Run}, {"tool call", art.ToolCall}, {"outcome", l.Outcome}} {
		if f.value != "" {
			row(f.name, f.value)
		}
	}
	if art.Cell > 0 {
		row("cell", art.Cell)
	}
	for _, d := range art.Datasets {
		row("dataset", strings.TrimSpace(d.ID+" "+d.SHA256))
	}
	for _, same := range l.Same {
		row("same bytes", same.ID+" "+same.Path)
	}
	if l.SameTruncated {
		row("same bytes", "… and more")
	}
	for i, line := range strings.Split(strings.TrimRight(l.Code, "\n"), "\n") {
		if l.Code != "" {
			row(map[bool]string{true: "code", false: ""}[i == 0], strings.ReplaceAll(line, "\t", "    "))
		}
	}
}

func (a *invocation) artifactsGet() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "get ID [FILE]", Short: "Save an artifact, verified",
		Long: "Save an artifact to a file, into a directory, or with - to standard output; without FILE under its own name here. What comes\n" +
			"is checked against its SHA-256: the file appears when all of it is right.",
		Example: "  cove artifacts get art_0123…\n  cove artifacts get art_0123… - | head",
		Args:    between(1, 2, "the id of an artifact and perhaps a file"), ValidArgsFunction: a.completeArtifacts(1),
		RunE: func(c *cobra.Command, args []string) error {
			to := "./"
			if len(args) == 2 {
				to = args[1]
			}
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.getArtifact(c.Context(), cl, args[0], to, force)
		},
	}
	c.Flags().BoolVarP(&force, "force", "f", false, "replace a file that is there")
	return c
}

// gotten is a file that was saved.
type gotten struct {
	File   string `json:"file"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

func (a *invocation) getArtifact(ctx context.Context, cl *client.Client, id, to string, force bool) error {
	art, content, err := cl.ReadArtifact(ctx, id)
	if err != nil {
		return err
	}
	defer content.Close()
	m := &meter{Reader: content, total: art.Size}
	if to == "-" {
		_, err := io.Copy(a.Out, m)
		return err
	}
	to = hereTarget(fileName(art), to)
	if _, err := os.Lstat(to); err == nil && !force {
		return fmt.Errorf("%s is there already; --force replaces it", to)
	}
	done := a.working(m.progress("reading " + art.Name))
	err = save(to, m, 0o644)
	done()
	if err != nil {
		return err
	}
	return a.print(gotten{to, m.done.Load(), art.SHA256}, func(t *table) { t.row(to) })
}

// fileName is a name for here: an artifact's own is the sandbox's word.
func fileName(art *client.Artifact) string {
	name := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == '/' || r == '\\' {
			return '_'
		}
		return r
	}, filepath.Base(art.Name))
	if strings.Trim(name, ".") == "" || strings.HasPrefix(name, "-") {
		return "./" + art.ID
	}
	return name
}

func (a *invocation) artifactsLink() *cobra.Command {
	var ttl time.Duration
	c := &cobra.Command{
		Use: "link ID", Short: "Print a link that needs no key, and ends",
		Example: "  cove artifacts link art_0123… --ttl 1h",
		Args:    exactArgs(1, "the id of an artifact"), ValidArgsFunction: a.completeArtifacts(1),
		RunE: func(c *cobra.Command, args []string) error {
			l, err := a.linkTo(c.Context(), args[0], ttl)
			if err != nil {
				return err
			}
			return a.print(l, func(t *table) { t.row(l.URL) })
		},
	}
	c.Flags().DurationVar(&ttl, "ttl", 0, "how long it holds, such as 1h; default is the server's, ten minutes")
	return c
}

func (a *invocation) linkTo(ctx context.Context, id string, ttl time.Duration) (*client.Link, error) {
	if ttl < 0 {
		return nil, usageError{errors.New("--ttl: more than nothing")}
	}
	cl, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	return cl.LinkArtifact(ctx, id, ttl)
}

func (a *invocation) artifactsOpen() *cobra.Command {
	return &cobra.Command{
		Use: "open ID", Short: "Open an artifact with what this machine opens files with",
		Long: "Open an artifact with what this machine opens links with, which saves it. Where there is no such thing, the link is printed.",
		Args: exactArgs(1, "the id of an artifact"), ValidArgsFunction: a.completeArtifacts(1),
		RunE: func(c *cobra.Command, args []string) error {
			l, err := a.linkTo(c.Context(), args[0], 0)
			if err != nil {
				return err
			}
			if _, live := terminal(a.Out); live && !a.json && show(c.Context(), l.URL) == nil {
				return nil
			}
			return a.print(l, func(t *table) { t.row(l.URL) })
		},
	}
}

// show hands a link to the desktop, where there is one.
func show(ctx context.Context, link string) error {
	opener := "xdg-open"
	switch {
	case runtime.GOOS == "darwin":
		opener = "open"
	case os.Getenv("DISPLAY") == "" && os.Getenv("WAYLAND_DISPLAY") == "":
		return errors.New("there is no desktop here")
	}
	return exec.CommandContext(ctx, opener, link).Run()
}

func (a *invocation) artifactsRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm ID...", Aliases: []string{"remove"}, Short: "Remove artifacts",
		Args: minArgs(1, "the ids of artifacts"), ValidArgsFunction: a.completeArtifacts(0),
		RunE: func(c *cobra.Command, ids []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach(ids, func(id string) error { return cl.RemoveArtifact(c.Context(), id) })
		},
	}
}

// completeArtifacts completes ids of artifacts, for so many arguments; 0 is any number.
func (a *invocation) completeArtifacts(most int) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return a.complete(c, begun, func(ctx context.Context, cl *client.Client) (ids []string, err error) {
			list, _, err := someArtifacts(ctx, cl, client.ArtifactsRequest{}, mostCompletions)
			for _, art := range list {
				ids = append(ids, art.ID)
			}
			return ids, err
		})
	}
}

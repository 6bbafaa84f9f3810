package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) image() *cobra.Command {
	return family("image", "Pull, import, build and remove container images", a.imagePull(), a.imageImport(), a.imageBuild(), a.imageList(), a.imageInspect(),
		a.imageTag(), a.imageRemove(), a.imagePrune())
}

// familiar is the name of an image as people say it, without what every name of Docker's own registry begins with.
func familiar(ref string) string {
	ref = strings.TrimPrefix(ref, dockerHub+"/library/")
	return strings.TrimPrefix(ref, dockerHub+"/")
}

// shortDigest is enough of a digest to tell images apart.
func shortDigest(digest string) string {
	_, hash, ok := strings.Cut(digest, ":")
	if !ok {
		hash = digest
	}
	return hash[:min(len(hash), 12)]
}

func (a *invocation) imageList() *cobra.Command {
	var quiet bool
	c := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the images that are here", Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			list, err := cl.Images(c.Context())
			if err != nil {
				return err
			}
			if len(list) == 0 && !a.json && !quiet {
				fmt.Fprintln(a.Err, "no images; `cove image pull NAME` gets one, `cove image build DIR` makes one")
				return nil
			}
			return a.print(list, func(t *table) { imageTable(t, list, quiet, time.Now()) })
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return c
}

func imageTable(t *table, list []client.ImageInfo, quiet bool, now time.Time) {
	if !quiet {
		t.head("NAME", "DIGEST", ">SIZE", ">LAYERS", "PLATFORM", "HERE SINCE")
	}
	for i := range list {
		one := &list[i]
		if quiet {
			t.row(familiar(one.Reference))
			continue
		}
		bytes, layers := "-", "-" // of what was built on a template
		if len(one.Layers) > 0 {
			bytes, layers = size(one.Bytes), strconv.Itoa(len(one.Layers))
		}
		t.row(familiar(one.Reference), cmp.Or(shortDigest(one.Digest), "-"), bytes, layers, cmp.Or(one.Platform, "-"), ago(one.Pulled, now))
	}
}

func (a *invocation) imageInspect() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Tell all about an image",
		Long:    "Tell all about an image that is here, by its name, its digest or a beginning of that.",
		Example: "  cove image inspect python:3.13-slim\n  cove image inspect myapp --json | jq .entrypoint",
		Args:    exactArgs(1, "the name of an image"), ValidArgsFunction: a.completeImages,
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			one, err := cl.Image(c.Context(), args[0])
			if err != nil {
				return err
			}
			return a.print(one, func(t *table) { describeImage(t, one, time.Now()) })
		},
	}
}

func describeImage(t *table, one *client.ImageInfo, now time.Time) {
	field := func(name, value string) {
		if value != "" {
			t.row(cell{name, bold}, value)
		}
	}
	field("name", one.Reference)
	field("digest", one.Digest)
	field("template", one.Template)
	field("platform", one.Platform)
	if !one.Created.IsZero() {
		field("created", moment(one.Created, now))
	}
	if !one.Pulled.IsZero() {
		field("here since", moment(one.Pulled, now))
	}
	if one.Bytes > 0 {
		field("size", size(one.Bytes))
	}
	field("entrypoint", quoted(one.Entrypoint))
	field("cmd", quoted(one.Cmd))
	field("user", cmp.Or(one.User, "root"))
	field("workdir", cmp.Or(one.Workdir, "/"))
	for _, name := range slices.Sorted(maps.Keys(one.Env)) {
		field("env", name+"="+one.Env[name])
	}
	for _, name := range slices.Sorted(maps.Keys(one.Labels)) {
		field("label", name+"="+one.Labels[name])
	}
	field("ports", strings.Join(one.Ports, " "))
	for _, l := range one.Layers {
		field("layer", l)
	}
}

// quoted is a command line of which it can be seen where each argument begins.
func quoted(argv []string) string {
	var parts []string
	for _, arg := range argv {
		if arg == "" || strings.ContainsAny(arg, " \t\n\"'\\$`&|;<>()*?[]#~") {
			arg = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
		}
		parts = append(parts, arg)
	}
	return strings.Join(parts, " ")
}

func (a *invocation) imageRemove() *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME...", Aliases: []string{"rm"}, Short: "Remove images",
		Long: "Remove images by their names; what an image with another name still needs stays. Sandboxes that run from one go on.\n" +
			"`cove image prune` frees the disk of layers that no image needs any more.",
		Args: minArgs(1, "the names of images"), ValidArgsFunction: a.completeImages,
		RunE: func(c *cobra.Command, names []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			return a.removeEach(names, func(name string) error { return cl.RemoveImage(c.Context(), name) })
		},
	}
}

func (a *invocation) imagePrune() *cobra.Command {
	return &cobra.Command{
		Use: "prune", Short: "Free the disk of what no image needs",
		Long: "Remove images without a name, the layers that builds keep so that the next one is quick, and layers that no image has\n" +
			"any more. What sandboxes run from stays until they end.",
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			done := a.working(still("removing what nobody needs"))
			result, err := cl.PruneImages(c.Context())
			done()
			if err != nil {
				return err
			}
			return a.print(result, func(t *table) {
				line := "removed " + count(len(result.Removed), "template", "templates")
				if result.FreedBytes > 0 {
					line += ", freed " + size(result.FreedBytes)
				}
				t.row(line)
			})
		},
	}
}

func (a *invocation) imageTag() *cobra.Command {
	return &cobra.Command{
		Use: "tag IMAGE|TEMPLATE NAME", Short: "Give an image another name, or a snapshot the name of an image",
		Example: "  cove image tag myapp:latest myapp:1.0\n  cove snapshot ID my-env && cove image tag my-env my-env",
		Args:    exactArgs(2, "what is there, and its new name"), ValidArgsFunction: a.completeImages,
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			req := client.TagRequest{Template: args[0], Reference: args[1]}
			one, err := cl.Image(c.Context(), args[0])
			switch {
			case err == nil:
				req.Template, req.Entrypoint, req.Cmd, req.Labels, req.Ports = one.Template, one.Entrypoint, one.Cmd, one.Labels, one.Ports
			case client.KindOf(err) != client.NotFound && client.KindOf(err) != client.Invalid:
				return err
			}
			info, err := cl.TagImage(c.Context(), req)
			if err != nil {
				return err
			}
			return a.print(info, func(t *table) { t.row(familiar(info.Reference)) })
		},
	}
}

// completeImages completes names of images.
func (a *invocation) completeImages(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	return a.complete(c, begun, func(ctx context.Context, cl *client.Client) (names []string, err error) {
		list, err := cl.Images(ctx)
		for i := range list {
			names = append(names, familiar(list[i].Reference))
		}
		return names, err
	})
}

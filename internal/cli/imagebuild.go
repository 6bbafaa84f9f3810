package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/cli/imagebuild"
)

// buildFlags are what a build can be told.
type buildFlags struct {
	imagebuild.Options
	args   []string
	limits sandboxFlags
}

func (a *invocation) imageBuild() *cobra.Command {
	var f buildFlags
	c := &cobra.Command{
		Use:   "build [DIR]",
		Short: "Build an image from a Dockerfile, in a sandbox",
		Long: "Build an image from a Dockerfile in a sandbox, without Docker. DIR, the current directory if it is not given, holds the\n" +
			"files that can be copied, without those that its .dockerignore names. What slow steps made is kept, so that a build\n" +
			"after a change runs only what comes after it.\n\n" +
			"Known are FROM (an image, a template, scratch or another stage), RUN, COPY (also --from, --chown, --chmod), ADD of files\n" +
			"of DIR, ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD, SHELL, LABEL and EXPOSE, and text below RUN and COPY (<<EOF).",
		Example: "  cove image build -t myapp .\n  cove image build -t myapp:dev -f dev.Dockerfile --build-arg VERSION=1.2 .\n  cove create --image myapp",
		Args:    maxArgs(1, "one directory"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(c *cobra.Command, dirs []string) error {
			o, err := f.options(a, cmp.Or(strings.Join(dirs, ""), "."))
			if err != nil {
				return err
			}
			return a.buildImage(c, o)
		},
	}
	f.register(c)
	return c
}

func (f *buildFlags) register(c *cobra.Command) {
	fs := c.Flags()
	fs.StringVarP(&f.Tag, "tag", "t", "", "`name` of the image; default is that of DIR")
	fs.StringVarP(&f.File, "file", "f", "", "the Dockerfile, if it is another `file` than DIR/Dockerfile; - reads standard input")
	fs.StringArrayVar(&f.args, "build-arg", nil, "`NAME=VALUE` of an ARG, or NAME for the value that it has in the environment here; may be repeated")
	fs.StringVar(&f.Target, "target", "", "`stage` to build instead of the last")
	fs.BoolVar(&f.Fresh, "no-cache", false, "run every step again")
	fs.BoolVar(&f.Pull, "pull", false, "ask the registry whether there is a newer base")
	fs.StringVar(&f.limits.memory, "memory", "", "memory of the sandbox that builds: a `size` such as 2G")
	fs.Float64Var(&f.limits.cpus, "cpus", 0, "its CPUs: a `number` such as 2")
	fs.StringVar(&f.limits.disk, "disk", "", "its disk: a `size` such as 10G")
	for _, name := range []string{"tag", "build-arg", "target", "memory", "cpus", "disk"} {
		completeFlag(c, name, cobra.NoFileCompletions)
	}
}

func (f *buildFlags) options(a *invocation, dir string) (imagebuild.Options, error) {
	o := f.Options
	var err error
	if o.Dir, err = filepath.Abs(dir); err != nil {
		return o, err
	}
	if o.Tag == "" {
		if o.Tag, err = nameOf(o.Dir); err != nil {
			return o, err
		}
	}
	if o.Args, err = buildArgs(f.args); err != nil {
		return o, err
	}
	req, err := f.limits.request()
	if err != nil {
		return o, err
	}
	o.Limits = req.Limits
	if o.File == "-" {
		o.File = ""
		o.Text, err = io.ReadAll(a.In)
	}
	return o, err
}

var notInNames = regexp.MustCompile(`[^a-z0-9._-]+`)

// nameOf is an image named after its directory.
func nameOf(dir string) (string, error) {
	name := strings.Trim(notInNames.ReplaceAllString(strings.ToLower(filepath.Base(dir)), "-"), "._-")
	if name == "" {
		return "", usageError{fmt.Errorf("%s gives no name for an image; give one with -t", dir)}
	}
	return name, nil
}

// buildArgs reads --build-arg. A value never appears in what is said of a build.
func buildArgs(given []string) (map[string]string, error) {
	all := map[string]string{}
	for _, pair := range given {
		name, value, ok := strings.Cut(pair, "=")
		if name == "" {
			return nil, usageError{fmt.Errorf("--build-arg: want NAME=VALUE or NAME")}
		}
		if !ok {
			if value, ok = os.LookupEnv(name); !ok {
				return nil, usageError{fmt.Errorf("--build-arg %s: there is no such variable here; want NAME=VALUE", name)}
			}
		}
		all[name] = value
	}
	return all, nil
}

func (a *invocation) buildImage(c *cobra.Command, o imagebuild.Options) error {
	cl, err := a.connect(c.Context())
	if err != nil {
		return err
	}
	ctx, stop := interruptible(c.Context())
	defer stop()
	report := &buildReport{a: a, colour: inColour(a.Err)}
	begun := time.Now()
	o.Client, o.Report = cl, report
	info, err := imagebuild.Build(ctx, o)
	report.finish()
	if err != nil {
		return interrupted(ctx, err)
	}
	return a.print(info, func(t *table) {
		t.row(familiar(info.Reference))
		fmt.Fprintf(a.Err, "built in %s; `cove create --image %s` starts from it\n", took(time.Since(begun)), familiar(info.Reference))
	})
}

// took is how long something has taken, with tenths where those count.
func took(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return short(d)
}

// buildReport tells of a build on standard error: a line for each step, and below it what it wrote.
type buildReport struct {
	a      *invocation
	colour bool
	pull   *pullProgress
	still  func() // ends the line that says for how long a step has said nothing
	rest   []byte // a line of output that has not ended
}

func (r *buildReport) Step(s imagebuild.Step) {
	r.finish()
	head := fmt.Sprintf("[%d/%d]", s.N, s.Of)
	if s.Stage != "" {
		head = fmt.Sprintf("[%s %d/%d]", s.Stage, s.N, s.Of)
	}
	line := paint(head, bold, r.colour) + " " + clean(cut(s.Text, 500))
	if s.Cached {
		line += " " + paint("cached", green, r.colour)
	}
	fmt.Fprintln(r.a.Err, line)
	if _, live := terminal(r.a.Err); live && !s.Cached {
		word, _, _ := strings.Cut(s.Text, " ")
		r.still = r.a.working(still("%s", word))
	}
}

// speak ends the line of a step that was silent.
func (r *buildReport) speak() {
	if r.still != nil {
		r.still()
		r.still = nil
	}
}

// Output is shown line by line, so that the two streams do not end up in each other's lines.
func (r *buildReport) Output(data []byte, _ bool) {
	r.speak()
	r.rest = append(r.rest, data...)
	for {
		at := bytes.IndexByte(r.rest, '\n')
		if at < 0 && len(r.rest) < 4<<10 {
			return
		}
		if at < 0 {
			at = len(r.rest) - 1
		}
		r.say(string(r.rest[:at]))
		r.rest = append(r.rest[:0], r.rest[at+1:]...)
	}
}

// say shows a line of a command. Of a progress bar that draws over itself only the last state is left.
func (r *buildReport) say(line string) {
	line = strings.TrimRight(line, "\r")
	if at := strings.LastIndexByte(line, '\r'); at >= 0 {
		line = line[at+1:]
	}
	fmt.Fprintln(r.a.Err, "  "+paint(clean(strings.ReplaceAll(line, "\t", "    ")), dim, r.colour))
}

func (r *buildReport) Pulled(image string, e client.PullEvent) {
	if r.pull == nil {
		r.pull = r.a.pullProgress(image)
	}
	r.pull.add(e)
}

func (r *buildReport) Note(text string) {
	r.finish()
	fmt.Fprintln(r.a.Err, paint("note:", yellow, r.colour), clean(text))
}

// finish ends what is shown of a pull or a line.
func (r *buildReport) finish() {
	r.speak()
	if r.pull != nil {
		r.pull.end()
		r.pull = nil
	}
	if len(r.rest) > 0 {
		r.say(string(r.rest))
		r.rest = nil
	}
}

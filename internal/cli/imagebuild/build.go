// Package imagebuild builds a container image from a Dockerfile in a sandbox, through the public API alone: it runs what
// the file says, keeps a snapshot of the files where that saves time later, and gives the last one the image's name. It
// knows neither driver nor registry.
package imagebuild

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/cli/dockerfile"
)

// Options say what to build.
type Options struct {
	Client *client.Client
	Dir    string            // whose files can be copied
	File   string            // the Dockerfile; empty: the one in Dir
	Text   []byte            // of the Dockerfile, where it is in no file
	Tag    string            // name of the image
	Args   map[string]string // values of ARGs
	Target string            // stage to build; empty: the last
	Fresh  bool              // use no layer of an earlier build
	Pull   bool              // ask registries whether there is a newer base
	Limits *client.Limits    // of the sandbox that builds
	Report Reporter
}

// Reporter is told how far a build is.
type Reporter interface {
	// Step begins one; cached: there is nothing left to do for it.
	Step(step Step)
	// Output is what a command wrote.
	Output(data []byte, stderr bool)
	// Pulled is how far an image is that the build needs.
	Pulled(image string, e client.PullEvent)
	// Note is a sentence for the person who builds.
	Note(text string)
}

// Step is a line of a Dockerfile that is built.
type Step struct {
	Stage  string // empty: there is one stage only
	N, Of  int
	Text   string // as it was written
	Cached bool
}

// prefix is what names of layers begin with. The server removes those that no image is made of when it prunes.
const prefix = "bld-"

// Build makes an image and gives it its name.
func Build(ctx context.Context, o Options) (*client.ImageInfo, error) {
	o.File = cmp.Or(o.File, filepath.Join(o.Dir, "Dockerfile"))
	file, err := o.parse()
	if err != nil {
		return nil, err
	}
	for _, w := range file.Warnings {
		o.Report.Note(w)
	}
	files, err := openLocal(o.Dir, o.File)
	if err != nil {
		return nil, err
	}
	defer files.Close()
	b := &builder{Options: o, file: file, files: files, stages: make([]*base, len(file.Stages)), used: map[string]bool{}}
	target, err := b.target()
	if err != nil {
		return nil, err
	}
	made, err := b.stage(ctx, target)
	if err != nil {
		return nil, err
	}
	b.unusedArgs()
	return o.Client.TagImage(ctx, client.TagRequest{
		Template: made.template, Reference: o.Tag, Entrypoint: made.entrypoint, Cmd: made.cmd, Labels: made.labels, Ports: made.ports,
	})
}

func (o *Options) parse() (*dockerfile.File, error) {
	if o.Text != nil {
		return dockerfile.Parse("Dockerfile", o.Text)
	}
	text, err := os.ReadFile(o.File)
	if err != nil {
		return nil, err
	}
	return dockerfile.Parse(shortName(o.File), text)
}

// shortName is a file as people name it.
func shortName(file string) string {
	if wd, err := os.Getwd(); err == nil {
		if rel, err := filepath.Rel(wd, file); err == nil && len(rel) < len(file) {
			return rel
		}
	}
	return file
}

// builder is one build.
type builder struct {
	Options
	file   *dockerfile.File
	files  *local
	stages []*base         // those that are built
	used   map[string]bool // which of Args were asked for
}

// base is what a stage starts from, and what it has become in the end.
type base struct {
	name     string // for people
	template string
	key      string // of its files and settings
	settings
}

func (b *builder) target() (int, error) {
	if b.Target == "" {
		return len(b.file.Stages) - 1, nil
	}
	if i, ok := b.file.Find(b.Target); ok {
		return i, nil
	}
	if i, err := strconv.Atoi(b.Target); err == nil && i >= 0 && i < len(b.file.Stages) {
		return i, nil
	}
	return 0, fmt.Errorf("there is no stage %q in %s", b.Target, shortName(b.File))
}

// stage builds one, once, and those that it needs before. It can only need those above it.
func (b *builder) stage(ctx context.Context, i int) (*base, error) {
	if b.stages[i] != nil {
		return b.stages[i], nil
	}
	s := &b.file.Stages[i]
	from, err := b.from(ctx, s, i)
	if err != nil {
		return nil, err
	}
	steps, err := b.evaluate(ctx, i, from)
	if err != nil {
		return nil, err
	}
	made, err := b.make(ctx, b.title(i), from, steps)
	if err != nil {
		return nil, err
	}
	b.stages[i] = made
	return made, nil
}

// title tells the stages of a file apart, where there are several.
func (b *builder) title(i int) string {
	if len(b.file.Stages) == 1 {
		return ""
	}
	return cmp.Or(b.file.Stages[i].Name, "stage-"+strconv.Itoa(i))
}

// from is what a stage starts from.
func (b *builder) from(ctx context.Context, s *dockerfile.Stage, i int) (*base, error) {
	args, err := b.globals()
	if err != nil {
		return nil, err
	}
	name, err := b.file.Expand(s.From.Words[0], args.lookup)
	if err != nil {
		return nil, s.From.Errorf("%v", err)
	}
	if name == "" {
		return nil, s.From.Errorf("%s is the name of no image: an ARG has no value; give it with --build-arg", s.From.Words[0])
	}
	platform, err := b.file.Expand(s.From.Flags["platform"], args.lookup)
	if err != nil {
		return nil, s.From.Errorf("%v", err)
	}
	if at, ok := b.file.Find(name); ok && at < i {
		made, err := b.stage(ctx, at)
		if err != nil {
			return nil, err
		}
		again := *made
		again.settings = made.settings.next()
		return &again, nil
	}
	from, err := b.image(ctx, name, platform)
	if err != nil {
		return nil, fmt.Errorf("%s:%d: FROM %s: %w", s.From.File, s.From.Line, name, err)
	}
	return from, nil
}

// scratch is the name under which an image without files is kept.
const scratch = "cove.local/scratch:latest"

// image is one of the server's, which pulls what it does not have.
func (b *builder) image(ctx context.Context, name, platform string) (*base, error) {
	ref := name
	if name == "scratch" {
		if err := b.makeScratch(ctx); err != nil {
			return nil, err
		}
		ref, platform = scratch, ""
	}
	info, err := b.Client.PullImage(ctx, client.PullRequest{Reference: ref, Platform: platform, IfMissing: !b.Pull || ref == scratch},
		func(e client.PullEvent) { b.Report.Pulled(name, e) })
	if err != nil {
		return nil, err
	}
	return &base{
		name: name, template: info.Template, key: digest("base", info.Template, info.Digest),
		settings: settings{
			env: info.Env, user: info.User, workdir: info.Workdir, shell: defaultShell,
			entrypoint: info.Entrypoint, cmd: info.Cmd, labels: info.Labels, ports: info.Ports,
		},
	}, nil
}

// makeScratch makes the empty image, which no registry has.
func (b *builder) makeScratch(ctx context.Context) error {
	_, err := b.Client.Image(ctx, scratch)
	if client.KindOf(err) != client.NotFound {
		return err
	}
	archive, err := emptyArchive()
	if err != nil {
		return err
	}
	_, err = b.Client.ImportImage(ctx, scratch, archive)
	return err
}

// unusedArgs tells of --build-arg values that nothing asked for, which are most often misspelled.
func (b *builder) unusedArgs() {
	for _, name := range slices.Sorted(maps.Keys(b.Args)) {
		if !b.used[name] {
			b.Report.Note("--build-arg " + name + " was not used: no ARG of that name stands in the file")
		}
	}
}

// digest is a hash of texts, whatever is in them.
func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// layerName is what the template of a layer is called.
func layerName(key string) string { return prefix + key[:32] }

var userForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$`)

// place says where a failure belongs, if it does not say so itself.
func place(i *dockerfile.Instruction, err error) error {
	var known *dockerfile.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	text := i.Text
	if len(text) > 200 {
		text = text[:200] + "…"
	}
	return fmt.Errorf("%s:%d: %s: %w", i.File, i.Line, strings.ToValidUTF8(text, "\uFFFD"), err)
}

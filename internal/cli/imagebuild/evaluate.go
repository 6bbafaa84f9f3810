package imagebuild

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/covehq/cove/internal/cli/dockerfile"
)

// step is an instruction of which it is known what there is after it, before it has run: its key stands for the files and
// settings then.
type step struct {
	*dockerfile.Instruction
	key   string
	after settings
	do    func(ctx context.Context, s *site) error // nil: it changes no files
}

// evaluation walks through the instructions of a stage.
type evaluation struct {
	b     *builder
	at    int // which stage
	key   string
	now   settings
	args  arguments
	outer arguments
}

// evaluate says what the steps of a stage will do. What is wrong with any of them is found here, before the first runs.
func (b *builder) evaluate(ctx context.Context, at int, from *base) ([]step, error) {
	outer, err := b.globals()
	if err != nil {
		return nil, err
	}
	e := &evaluation{b: b, at: at, key: from.key, now: from.settings.clone(), args: arguments{}, outer: outer}
	var steps []step
	for n := range b.file.Stages[at].Steps {
		i := &b.file.Stages[at].Steps[n]
		do, err := e.follow(ctx, i)
		if err != nil {
			return nil, place(i, err)
		}
		steps = append(steps, step{Instruction: i, key: e.key, after: e.now.clone(), do: do})
	}
	return steps, nil
}

// extend makes the key that of one more thing that was done.
func (e *evaluation) extend(parts ...string) { e.key = digest(append([]string{e.key}, parts...)...) }

// lookup is a variable as instructions see it: ENV goes before ARG.
func (e *evaluation) lookup(name string) (string, bool) {
	if v, ok := e.now.env[name]; ok {
		return v, true
	}
	v, ok := e.args[name]
	return v, ok
}

func (e *evaluation) expand(i *dockerfile.Instruction, word string) (string, error) {
	out, err := e.b.file.Expand(word, e.lookup)
	if err != nil {
		return "", i.Errorf("%v", err)
	}
	return out, nil
}

func (e *evaluation) follow(ctx context.Context, i *dockerfile.Instruction) (func(context.Context, *site) error, error) {
	switch i.Name {
	case "RUN":
		return e.run(i)
	case "COPY", "ADD":
		return e.copy(ctx, i)
	case "WORKDIR":
		return e.workdir(i)
	case "ARG":
		return nil, e.b.declare(i, e.args, e.outer, e.lookup)
	case "ENV":
		return nil, e.env(i)
	case "USER":
		return nil, e.user(i)
	case "LABEL":
		return nil, e.label(i)
	case "EXPOSE":
		return nil, e.expose(i)
	case "SHELL":
		e.now.shell = i.Words
	case "CMD":
		e.now.cmd, e.now.ownCmd = e.command(i), true
	case "ENTRYPOINT":
		e.now.entrypoint = e.command(i)
		if !e.now.ownCmd { // the base's command was meant for the base's entrypoint
			e.now.cmd = nil
		}
	default:
		return nil, i.Errorf("%s is not supported", i.Name)
	}
	return nil, nil
}

// command is what CMD, ENTRYPOINT or RUN runs.
func (e *evaluation) command(i *dockerfile.Instruction) []string {
	if i.Exec {
		return i.Words
	}
	return append(slices.Clone(e.now.shell), i.Rest)
}

func (e *evaluation) run(i *dockerfile.Instruction) (func(context.Context, *site) error, error) {
	argv := e.command(i)
	if len(i.Docs) > 0 {
		script, err := scriptOf(i)
		if err != nil {
			return nil, err
		}
		argv = append(slices.Clone(e.now.shell), script)
	}
	env := e.b.proxies()
	maps.Copy(env, e.args)
	maps.Copy(env, e.now.set)
	parts := append([]string{"run"}, argv...)
	for _, name := range slices.Sorted(maps.Keys(e.args)) {
		parts = append(parts, name+"="+e.args[name])
	}
	e.extend(parts...)
	user, dir := e.now.user, e.now.workdir
	return func(ctx context.Context, s *site) error { return s.run(ctx, argv, env, user, dir) }, nil
}

var onlyDoc = regexp.MustCompile(`^<<-?["']?[A-Za-z_][A-Za-z0-9_]*["']?$`)

// scriptOf is a command with text below it: that is the command itself where nothing else stands on the line, else the
// shell's to read.
func scriptOf(i *dockerfile.Instruction) (string, error) {
	if !onlyDoc.MatchString(strings.TrimSpace(i.Rest)) {
		script := i.Rest + "\n"
		for _, d := range i.Docs {
			script += d.Text + d.Name + "\n"
		}
		return script, nil
	}
	if strings.HasPrefix(i.Docs[0].Text, "#!") {
		return "", i.Errorf("a script with an interpreter of its own (#!) is not supported here; COPY it to a file and RUN that")
	}
	return i.Docs[0].Text, nil
}

func (e *evaluation) env(i *dockerfile.Instruction) error {
	pairs, err := e.b.file.Pairs(i, e.lookup)
	if err != nil {
		return err
	}
	for _, p := range pairs {
		if !envName.MatchString(p.Name) {
			return i.Errorf("%.60q is not a name for an environment variable", p.Name)
		}
		e.now.env[p.Name], e.now.set[p.Name] = p.Value, p.Value
		e.extend("env", p.Name, p.Value)
	}
	return nil
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func (e *evaluation) user(i *dockerfile.Instruction) error {
	user, err := e.expand(i, i.Words[0])
	if err != nil {
		return err
	}
	if !userForm.MatchString(user) {
		return i.Errorf("%.60q is not a user: write a name or a number, also with a group: app:staff", user)
	}
	e.now.user = user
	e.extend("user", user)
	return nil
}

func (e *evaluation) workdir(i *dockerfile.Instruction) (func(context.Context, *site) error, error) {
	dir, err := e.expand(i, i.Rest)
	if err != nil {
		return nil, err
	}
	if dir == "" {
		return nil, i.Errorf("WORKDIR wants a path")
	}
	dir = e.absolute(dir)
	e.now.workdir = dir
	e.extend("workdir", dir)
	return func(ctx context.Context, s *site) error {
		_, err := s.files.Mkdir(ctx, dir)
		return err
	}, nil
}

// absolute is a path from the working directory on.
func (e *evaluation) absolute(p string) string {
	if !path.IsAbs(p) {
		p = path.Join("/", e.now.workdir, p)
	}
	return path.Clean(p)
}

func (e *evaluation) label(i *dockerfile.Instruction) error {
	pairs, err := e.b.file.Pairs(i, e.lookup)
	for _, p := range pairs {
		e.now.labels[p.Name] = p.Value
	}
	return err
}

func (e *evaluation) expose(i *dockerfile.Instruction) error {
	for _, w := range i.Words {
		port, err := e.expand(i, w)
		if err != nil {
			return err
		}
		number, protocol, given := strings.Cut(port, "/")
		if !given {
			protocol = "tcp"
		}
		first, last, _ := strings.Cut(number, "-")
		for _, n := range []string{first, last} {
			if v, err := strconv.Atoi(n); n != "" && (err != nil || v < 1 || v > 65535) || first == "" {
				return i.Errorf("%.40q is not a port: write 80 or 80/udp", port)
			}
		}
		if port = number + "/" + protocol; !slices.Contains(e.now.ports, port) {
			e.now.ports = append(e.now.ports, port)
		}
	}
	return nil
}

// copy says what a COPY will copy. What it copies from here is part of its key, byte by byte.
func (e *evaluation) copy(ctx context.Context, i *dockerfile.Instruction) (func(context.Context, *site) error, error) {
	words := slices.Clone(i.Words)
	for n := range words {
		if strings.HasPrefix(words[n], "<<") && len(i.Docs) > 0 {
			continue
		}
		var err error
		if words[n], err = e.expand(i, words[n]); err != nil {
			return nil, err
		}
	}
	owner, err := e.expand(i, i.Flags["chown"])
	if err != nil {
		return nil, err
	}
	if owner != "" && !userForm.MatchString(owner) {
		return nil, i.Errorf("--chown=%.60q: write USER or USER:GROUP", owner)
	}
	dest := words[len(words)-1]
	c := &copying{
		dest: e.absolute(dest), owner: owner, sources: words[:len(words)-1],
		into: len(words) > 2 || dest == "." || strings.HasSuffix(dest, "/") || strings.HasSuffix(dest, "/."),
	}
	if m := i.Flags["chmod"]; m != "" {
		bits, err := strconv.ParseUint(m, 8, 12)
		if err != nil {
			return nil, i.Errorf("--chmod=%.20q: write octal digits such as 0755", m)
		}
		c.mode = uint32(bits)
	}
	parts := []string{"copy", c.dest, fmt.Sprint(c.into), c.owner, fmt.Sprint(c.mode)}
	if i.Flags["from"] != "" {
		err = e.copyFrom(ctx, i, c, &parts)
	} else {
		err = e.copyLocal(ctx, i, c, &parts)
	}
	if err != nil {
		return nil, err
	}
	e.extend(parts...)
	return c.perform, nil
}

// copyFrom copies out of another stage or image, whose own key says what is in it.
func (e *evaluation) copyFrom(ctx context.Context, i *dockerfile.Instruction, c *copying, parts *[]string) error {
	name, err := e.b.file.Expand(i.Flags["from"], e.outer.lookup)
	if err != nil {
		return i.Errorf("%v", err)
	}
	if len(i.Docs) > 0 {
		return i.Errorf("COPY --from and text that stands in the Dockerfile do not go together")
	}
	source, err := e.b.source(ctx, name, e.at)
	if err != nil {
		return fmt.Errorf("--from=%s: %w", name, err)
	}
	c.from = source
	encoded, err := json.Marshal(c.sources)
	if err != nil {
		return err
	}
	*parts = append(*parts, source.key, string(encoded))
	return nil
}

// source is a stage above by its name or number, else an image.
func (b *builder) source(ctx context.Context, name string, above int) (*base, error) {
	at, ok := b.file.Find(name)
	if n, err := strconv.Atoi(name); err == nil && !ok {
		if n < 0 || n >= above {
			return nil, fmt.Errorf("there is no stage %d above this one", n)
		}
		at, ok = n, true
	}
	if ok && at < above {
		return b.stage(ctx, at)
	}
	if ok {
		return nil, fmt.Errorf("the stage stands further down; move it up")
	}
	return b.image(ctx, name, "")
}

// copyLocal copies files from beside the Dockerfile, or text from within it.
func (e *evaluation) copyLocal(ctx context.Context, i *dockerfile.Instruction, c *copying, parts *[]string) error {
	for _, d := range i.Docs {
		text := d.Text
		if d.Expand {
			var err error
			if text, err = e.b.file.ExpandText(text, e.lookup); err != nil {
				return i.Errorf("%v", err)
			}
		}
		c.texts = append(c.texts, inline{d.Name, text})
		*parts = append(*parts, "text", d.Name, text)
	}
	c.sources = slices.DeleteFunc(c.sources, func(w string) bool { return len(i.Docs) > 0 && strings.HasPrefix(w, "<<") })
	c.local = e.b.files
	if err := c.find(ctx, c.local); err != nil {
		return err
	}
	for _, item := range c.items {
		if i.Name == "ADD" && item.kind == kindFile && isArchive(item.path) {
			return i.Errorf("ADD would unpack %s; COPY it and RUN tar, or unpack it first", item.path)
		}
		sum, err := hashNode(ctx, c.local, item.node)
		if err != nil {
			return err
		}
		*parts = append(*parts, string(item.kind), item.to, strconv.FormatUint(uint64(item.mode), 8), sum)
	}
	return nil
}

var archiveForm = regexp.MustCompile(`\.(tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst))$`)

func isArchive(name string) bool { return archiveForm.MatchString(name) }

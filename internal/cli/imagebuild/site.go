package imagebuild

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/covehq/cove/client"
)

// site is the sandbox in which a stage is built.
type site struct {
	b     *builder
	sb    *client.Sandbox
	files client.Files // as root: who copies is not who runs
}

const (
	buildFor  = 12 * time.Hour   // how long a build may take, where the server allows it
	unusedFor = 10 * time.Minute // ends the sandbox of a build that was killed
	endFor    = 20 * time.Second
)

// open starts a sandbox; end removes it, also after an interrupt.
func (b *builder) open(ctx context.Context, template string) (s *site, end func(), err error) {
	req := client.CreateRequest{
		Template: template, Limits: b.Limits, TimeoutSeconds: buildFor.Seconds(), IdleTimeoutSeconds: unusedFor.Seconds(),
		Metadata: map[string]string{"cove.image-build": "true"},
	}
	sb, err := b.Client.Create(ctx, req)
	if client.KindOf(err) == client.Invalid { // so long is not allowed here
		req.TimeoutSeconds = 0
		sb, err = b.Client.Create(ctx, req)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("start a sandbox: %w", err)
	}
	return &site{b, sb, sb.Files().As("root")}, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endFor)
		defer cancel()
		if err := sb.Kill(ctx); err != nil {
			b.Report.Note(fmt.Sprintf("sandbox %s may still run: %v", sb.ID, err))
		}
	}, nil
}

// openSource starts a sandbox of another stage or image, whose files are copied.
func (b *builder) openSource(ctx context.Context, from *base) (tree, func(), error) {
	s, end, err := b.open(ctx, from.template)
	if err != nil {
		return nil, nil, err
	}
	return &remote{s.files, from.name}, end, nil
}

// slowEnough is how long steps must have taken together for their files to be kept before the last step: to keep them
// takes a while too, and as much disk as they have written. What is quick is done again.
const slowEnough = 100 * time.Millisecond

// make builds the steps of a stage that no earlier build has left a layer of.
func (b *builder) make(ctx context.Context, title string, from *base, steps []step) (*base, error) {
	if len(steps) == 0 { // an image of its own all the same, which can be removed
		steps = []step{{key: digest(from.key, "same"), after: from.settings.clone()}}
	}
	last := len(steps) - 1
	made := &base{name: from.name, key: steps[last].key, settings: steps[last].after}
	if title != "" {
		made.name = title
	}
	show := b.shown(title, steps)
	done, template, err := b.cached(ctx, from, steps)
	if err != nil {
		return nil, err
	}
	show(-1, from.name, done > 0)
	for i := range done {
		show(i, "", true)
	}
	if done == len(steps) {
		made.template = template
		return made, nil
	}
	made.template, err = b.walk(ctx, template, steps, done, show)
	return made, err
}

// shown tells of steps by their number, FROM first; settings have none.
func (b *builder) shown(title string, steps []step) func(i int, from string, cached bool) {
	total := 1
	for _, s := range steps {
		if s.do != nil {
			total++
		}
	}
	n := 0
	return func(i int, from string, cached bool) {
		text := "FROM " + from
		if i >= 0 {
			if steps[i].do == nil {
				return
			}
			text = steps[i].Text
		}
		n++
		b.Report.Step(Step{Stage: title, N: n, Of: total, Text: text, Cached: cached})
	}
}

// walk runs steps in a sandbox and keeps layers of it; the last is the image's.
func (b *builder) walk(ctx context.Context, template string, steps []step, done int, show func(int, string, bool)) (string, error) {
	s, end, err := b.open(ctx, template)
	if err != nil {
		return "", err
	}
	defer end()
	var since time.Duration
	for i := done; i < len(steps); i++ {
		st := &steps[i]
		show(i, "", false)
		begun := time.Now()
		if st.do != nil {
			if err := st.do(ctx, s); err != nil {
				return "", place(st.Instruction, err)
			}
		}
		since += time.Since(begun)
		last := i == len(steps)-1
		if !last && (st.do == nil || since < slowEnough) {
			continue
		}
		name, err := s.keep(ctx, st)
		if err != nil && last {
			return "", fmt.Errorf("keep the image: %w", err)
		}
		if err != nil {
			b.Report.Note("the next build will run this again: " + err.Error())
		}
		if template = name; last {
			return template, nil
		}
		since = 0
	}
	return "", errors.New("a build without steps")
}

// cached finds the layer that saves the most steps, and where there is none what the stage starts from.
func (b *builder) cached(ctx context.Context, from *base, steps []step) (done int, template string, err error) {
	if b.Fresh {
		return 0, from.template, nil
	}
	for n := len(steps); n > 0; n-- {
		if n < len(steps) && steps[n-1].do == nil {
			continue // only files and the very end are kept
		}
		name := layerName(steps[n-1].key)
		t, err := b.Client.Template(ctx, name)
		switch {
		case err == nil && t.Built:
			return n, name, nil
		case err == nil: // a part of it is missing: it makes way for a new one
			_ = b.Client.RemoveTemplate(ctx, name)
		case client.KindOf(err) != client.NotFound:
			return 0, "", err
		}
	}
	return 0, from.template, nil
}

// keep makes a layer of the sandbox's files, for this build and later ones.
func (s *site) keep(ctx context.Context, st *step) (string, error) {
	name := layerName(st.key)
	if s.b.Fresh { // the one of that name may be an older image, which stays what it is
		name = prefix + randomHex()
	}
	_, err := s.sb.Snapshot(ctx, client.SnapshotRequest{
		Name: name, Description: "layer of an image build", Env: st.after.set, User: st.after.user, Workdir: st.after.workdir,
	})
	if client.KindOf(err) == client.Conflict && !s.b.Fresh { // another build was faster with the same
		return name, nil
	}
	return name, err
}

func randomHex() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the process instead
	return hex.EncodeToString(b[:])
}

// isDir tells whether a path is a directory, also by a link.
func (s *site) isDir(ctx context.Context, name string) bool {
	e, err := s.files.Stat(ctx, name)
	if err != nil || e.Type == "file" {
		return false
	}
	if e.Type == "dir" {
		return true
	}
	_, err = s.files.List(ctx, name, 1)
	return err == nil
}

// run runs a command and passes on what it says.
func (s *site) run(ctx context.Context, argv []string, env map[string]string, user, dir string) error {
	for e, err := range s.sb.ExecStream(ctx, client.ExecRequest{Argv: argv, Env: env, User: user, Cwd: dir}) {
		if err != nil {
			return err
		}
		switch e.Type {
		case client.EventStdout, client.EventStderr:
			s.b.Report.Output(e.Data(), e.Type == client.EventStderr)
		case client.EventEnd:
			return failure(e.End)
		case client.EventStarted, client.EventResult, client.EventError, client.EventFile, client.EventNotice, client.EventFault:
		}
	}
	return errors.New("the stream of a command ended without an end")
}

// failure is why a command did not succeed; nil: it did.
func failure(end *client.End) error {
	switch {
	case end == nil || end.Outcome == client.OutcomeOK && end.ExitCode == 0:
		return nil
	case end.Outcome == client.OutcomeOOM:
		return errors.New("it was killed for lack of memory; give the build more with --memory")
	case end.Signal != "":
		return errors.New("it was ended by " + end.Signal)
	case end.Outcome == client.OutcomeError:
		return errors.New("exit status " + strconv.Itoa(end.ExitCode))
	case end.Message != "":
		return errors.New(end.Message)
	}
	return errors.New("it ended: " + end.Outcome)
}

// makeLinks makes symbolic links; arguments are targets and paths by turns.
const makeLinks = `set -e; while [ $# -gt 0 ]; do ln -sfn -- "$1" "$2"; shift 2; done`

// linksAtOnce is how many links one command makes.
const linksAtOnce = 200

func (s *site) link(ctx context.Context, pairs []string) error {
	for len(pairs) > 0 {
		n := min(len(pairs), 2*linksAtOnce)
		out, err := s.sb.Exec(ctx, client.ExecRequest{Argv: append([]string{"/bin/sh", "-c", makeLinks, "cove"}, pairs[:n]...), User: "root", Cwd: "/"})
		if client.KindOf(err) == client.NotFound {
			return fmt.Errorf("%s is a symbolic link, and the image has no shell to make it with; copy what it leads to", pairs[1])
		}
		if err == nil {
			err = failure(&out.End)
		}
		if err != nil {
			return fmt.Errorf("make links such as %s: %w", pairs[1], err)
		}
		pairs = pairs[n:]
	}
	return nil
}

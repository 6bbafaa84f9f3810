package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/template"
)

// peer is another way to give somebody an environment: a program that is started for each job and prints the answer.
// It gets the template's own files, user, environment variables and, where it has limits, limits.
type peer struct {
	name    string
	version string
	skip    string // why it does not take part
	command func(id string, argv []string) (*exec.Cmd, error)
	clear   func(id string) error // what is left when the program has ended; nil: nothing
}

// peers are the others, and what they need: one directory with the template's files, seen by them alone.
type peers struct {
	stage *stage
	dir   string
	root  string // the template's files as one tree
	tmpl  *template.Template
	all   []*peer
	docker
}

// openPeers makes ready whatever is installed on this host; what is not has its reason to be skipped.
func openPeers(ctx context.Context, w *world) *peers {
	p := &peers{stage: newStage(), dir: filepath.Join(w.dir, "peers"), tmpl: w.template}
	p.root = filepath.Join(p.dir, "root")
	err := os.MkdirAll(p.root, 0o755)
	if err == nil {
		err = p.stage.do(p.arrange)
	}
	p.all = []*peer{p.plain(), p.bubblewrap(), p.oci("crun"), p.oci("runc"), p.engine(ctx)}
	for _, x := range p.all {
		if err != nil {
			x.skip = fmt.Sprintf("the template's files could not be put together: %v", err)
		}
		if x.skip == "" {
			x.skip = p.rehearse(ctx, x)
		}
	}
	return p
}

// about gives the versions of those who take part and the reasons of those who do not.
func (p *peers) about() (map[string]string, []skipped) {
	versions, missing := map[string]string{}, []skipped(nil)
	for _, x := range p.all {
		if x.skip != "" {
			missing = append(missing, skipped{x.name, x.skip})
			continue
		}
		versions[x.name] = x.version
	}
	return versions, missing
}

// rehearse does every job once, so that no sample is the first of its kind, and tells why one cannot be done.
func (p *peers) rehearse(ctx context.Context, x *peer) (why string) {
	for _, j := range []job{sayJob, sumJob, dataJob} {
		undo, err := p.do(ctx, x, j)
		if err == nil {
			err = undo()
		}
		if err != nil {
			return fmt.Sprintf("%s: %v", j.scenario, err)
		}
	}
	return ""
}

// subjects are the peers that take part, each with a job.
func (p *peers) subjects(j job) (all []subject) {
	for _, x := range p.all {
		if x.skip == "" {
			all = append(all, subject{x.label(j), func(ctx context.Context) (func() error, error) { return p.do(ctx, x, j) }})
		}
	}
	return all
}

// label is what a peer is called in the results of a job: a command needs no python.
func (x *peer) label(j job) string {
	if x.name == plainName && j.cell == "" {
		return "exec"
	}
	return x.name
}

func (p *peers) find(name string) *peer {
	for _, x := range p.all {
		if x.name == name && x.skip == "" {
			return x
		}
	}
	return nil
}

// jobTime is how long any of them may take.
const jobTime = 2 * time.Minute

// do starts the program and returns when it has printed the answer: for a command when it has ended too, which is what a
// caller waits for. Its end and what it leaves are the undo's.
func (p *peers) do(ctx context.Context, x *peer, j job) (undo func() error, err error) {
	argv := j.argv
	if j.cell != "" {
		argv = []string{p.tmpl.Python.Executable, "-c", j.code}
	}
	id := p.stage.name()
	cmd, err := x.command(id, argv)
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var complaint strings.Builder
	cmd.Stderr = &complaint
	if err := p.stage.do(cmd.Start); err != nil {
		return nil, err
	}
	late := time.AfterFunc(jobTime, func() { _ = cmd.Process.Kill() })
	leave := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	finish := func() error {
		defer late.Stop()
		defer leave()
		err := cmd.Wait()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(complaint.String()))
		}
		if x.clear != nil {
			err = errors.Join(err, x.clear(id))
		}
		return err
	}
	said, err := bufio.NewReader(out).ReadString('\n')
	if strings.TrimSpace(said) != j.answer {
		return nil, errors.Join(fmt.Errorf("it said %q, not %q", said, j.answer), err, finish())
	}
	if j.cell != "" {
		return finish, nil
	}
	return func() error { return nil }, finish()
}

// arrange puts the template's layers together below root, as a sandbox sees them. It runs on the stage, whose mounts
// nobody else sees.
func (p *peers) arrange() error {
	for _, t := range p.tmpl.Trees {
		target := filepath.Join(p.root, t.Target)
		if err := mountLayers(target, t.Lower); err != nil {
			return err
		}
	}
	return nil
}

// environment is the template's, with what every process has.
func (p *peers) environment() []string {
	env := map[string]string{"HOME": "/home/" + p.tmpl.User, "USER": p.tmpl.User}
	maps.Copy(env, p.tmpl.Env)
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// userID is the ordinary user of every template.
const userID = 1000

// close stops what was started and gives the stage up; its mounts go with it.
func (p *peers) close() error {
	if p == nil {
		return nil
	}
	err := p.docker.close()
	p.stage.close()
	return err
}

// version is the first line that a program says about itself.
func version(program string, args ...string) string {
	out, err := exec.Command(program, args...).Output()
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return first
}

// missing is the reason of a program that is not here.
func missing(program, pkg string) string {
	return fmt.Sprintf("there is no %s on this host: apt-get install %s", program, pkg)
}

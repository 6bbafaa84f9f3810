package app

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// renewCommand is the internal command of the child that renews templates.
const renewCommand = "renew-templates"

// renewal is a child process that renews templates while the server serves those that are built: it
// builds again what a change of the host or of a definition has made out of date, and later what
// the server finds damaged. It is started while the server is root, since building needs root, and
// ends with the server.
type renewal struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	lines   io.ReadCloser
	checked chan struct{} // closed when the child has looked at the templates that the server prepares, or has ended
	built   chan string   // names of templates that were replaced; closed when the child has ended
	done    chan struct{} // closed when the child has ended
	state   *templateState
	byHand  func(name string) string // what root runs to build a template again
	log     *slog.Logger

	once   sync.Once
	closed error
}

// renewed is one line that the child writes.
type renewed struct {
	Template string `json:"template"`
	State    string `json:"state"`
	Message  string `json:"message,omitempty"`
}

// The states of a template in renewal.
const (
	renewDamaged  = "damaged"  // a layer is not as it was built: no sandbox starts from it
	renewChecked  = "checked"  // the templates that the server prepares were looked at; it names none
	renewCurrent  = "current"  // it is up to date
	renewBuilding = "building" // the earlier one serves until then, unless it is damaged
	renewBuilt    = "built"    // the new one serves from now on
	renewFailed   = "failed"   // the earlier one goes on to serve, unless it is damaged
)

// What the server tells the child, a line each.
const (
	renewFinish  = "finish\n" // finish the build that goes on, although the server ends
	renewRebuild = "rebuild " // and a name: build this template again, it does not work
)

// templateState is what the server knows of its templates beyond the records: /readyz tells it.
type templateState struct {
	mu      sync.Mutex
	states  map[string]string // by template
	damaged map[string]string // the digest by template, empty if unknown; until it is built
}

func (s *templateState) hear(r renewed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.State == renewCurrent && s.damaged[r.Template] != "" {
		return // the server found it damaged, and the digest is the same: its build is still to come
	}
	s.set(r.Template, r.State)
	switch r.State {
	case renewDamaged:
		if _, known := s.damaged[r.Template]; !known {
			s.damaged[r.Template] = ""
		}
	case renewBuilt, renewCurrent:
		delete(s.damaged, r.Template)
	}
}

// set notes the state of a template. The caller holds mu.
func (s *templateState) set(name, state string) {
	if s.states == nil {
		s.states, s.damaged = map[string]string{}, map[string]string{}
	}
	s.states[name] = state
}

// damage notes that a template does not work, and reports whether that is news.
func (s *templateState) damage(name, digest string) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.damaged[name]; ok && (known == digest || known == "") {
		return false
	}
	s.set(name, renewDamaged)
	s.damaged[name] = digest
	return true
}

// refresh forgets the damage of templates that have another digest now: another process has built
// them.
func (s *templateState) refresh(digestOf func(name string) string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, digest := range s.damaged {
		if digest == "" {
			continue
		}
		if now := digestOf(name); now != "" && now != digest {
			delete(s.damaged, name)
			s.states[name] = renewBuilt
		}
	}
}

// giveUp notes that no damaged template is built again any more.
func (s *templateState) giveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.damaged {
		s.states[name] = renewFailed
	}
}

// notes are sentences for /readyz. They are read without a key, so they hold no path and no error.
func (s *templateState) notes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, name := range slices.Sorted(maps.Keys(s.states)) {
		_, damaged := s.damaged[name]
		switch state := s.states[name]; {
		case damaged: // check tells it
		case state == renewBuilding:
			all = append(all, fmt.Sprintf("template %s is being built again; the earlier one serves", name))
		case state == renewFailed:
			all = append(all, fmt.Sprintf("template %s could not be built again, so the earlier one serves; the server's log says why", name))
		}
	}
	return all
}

// check fails while a template is damaged.
func (s *templateState) check(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.damaged)) {
		return gateway.Public(s.refusal(name))
	}
	return nil
}

// usable fails for a template that is damaged.
func (s *templateState) usable(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, damaged := s.damaged[name]; damaged {
		return fault.New(fault.Unavailable, "%s", s.refusal(name))
	}
	return nil
}

// refusal says why no sandbox starts from a damaged template. The caller holds mu.
func (s *templateState) refusal(name string) string {
	if s.states[name] == renewFailed {
		return "template " + name + " is damaged and could not be built again; the server's log says why"
	}
	return "template " + name + " is damaged and is being built again; try again later"
}

func (s *templateState) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(slices.Collect(maps.Values(s.states)), renewBuilding)
}

// renewTemplates starts the child. Without root there is none: templates stay as they are, and one
// that cannot be used is refused.
func (s *Server) renewTemplates(t builtTemplates, names []string) error {
	if os.Geteuid() != 0 {
		for _, name := range names {
			if err := t.CheckPython(name); err != nil {
				s.repair(t, name, err)
			}
		}
		return nil
	}
	cmd := exec.Command("/proc/self/exe", append([]string{renewCommand, t.Dir()}, names...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the server, which tells the child
	r := &renewal{
		cmd: cmd, checked: make(chan struct{}), built: make(chan string, len(names)+maxOrders), done: make(chan struct{}),
		state: t.state, byHand: s.rebuildByHand, log: s.log,
	}
	var err error
	if r.stdin, err = cmd.StdinPipe(); err != nil {
		return err
	}
	if r.lines, err = cmd.StdoutPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the renewal of templates: %w", err)
	}
	go r.follow()
	s.renewal = r
	s.undo.add("end the renewal of templates", func() error { return r.close(s.cfg.Ephemeral) })
	return nil
}

// repair has a template built again that does not work: no sandbox starts from it until then.
// Without root it stays damaged until root builds it.
func (s *Server) repair(t builtTemplates, name string, why error) {
	if s.renewal == nil {
		s.refuse(t, name, why)
		return
	}
	if !t.state.damage(name, t.digest(name)) {
		return
	}
	s.log.Error("a template does not work; it is built again, and no sandbox starts from it until then", "template", name, "error", why)
	s.renewal.rebuild(name)
}

// refuse lets no sandbox start from a template that does not work until root builds it again.
func (s *Server) refuse(t builtTemplates, name string, why error) {
	if !t.state.damage(name, t.digest(name)) {
		return
	}
	t.state.hear(renewed{name, renewFailed, ""})
	s.log.Error("a template does not work, and no sandbox starts from it until root corrects the cause and builds it again: "+
		s.rebuildByHand(name), "template", name, "error", why)
}

// rebuildByHand is what root runs after the cause of a damage is corrected.
//
// Without --rebuild a template that is as it was built keeps its digest, and the server goes on to
// refuse it.
func (s *Server) rebuildByHand(name string) string {
	return fmt.Sprintf("sudo cove template build %s --rebuild --data-dir %q", name, s.cfg.DataDir)
}

// rebuild tells the child to build a template again.
func (r *renewal) rebuild(name string) {
	if _, err := io.WriteString(r.stdin, renewRebuild+name+"\n"); err != nil {
		r.state.hear(renewed{name, renewFailed, ""})
		r.log.Error("a damaged template cannot be built again before the server is restarted", "template", name, "error", err)
	}
}

// checkPatience is how long a start waits for the look at the templates: a slow disk takes longer than the look is worth.
const checkPatience = 20 * time.Second

// awaitCheck returns when the child has looked at the templates that the server prepares, so that none of
// their zygotes imports from a damaged one.
func (r *renewal) awaitCheck(ctx context.Context) {
	late := time.NewTimer(checkPatience)
	defer late.Stop()
	select {
	case <-r.checked:
	case <-late.C:
		r.log.Warn("the templates are not checked yet; serving from them", "waited", checkPatience)
	case <-ctx.Done():
	}
}

// follow hears the child until it ends.
func (r *renewal) follow() {
	checked := sync.OnceFunc(func() { close(r.checked) })
	defer close(r.done)
	defer r.state.giveUp()
	defer close(r.built)
	defer checked()
	lines := bufio.NewScanner(r.lines)
	for lines.Scan() {
		var line renewed
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			continue
		}
		if line.State == renewChecked {
			checked()
			continue
		}
		r.state.hear(line)
		switch line.State {
		case renewDamaged:
			r.log.Error("a template is not as it was built; it is built again, and no sandbox starts from it until then", "template", line.Template, "damage", line.Message)
		case renewBuilding:
			if r.state.usable(line.Template) != nil {
				continue // that it is built again was logged with its damage
			}
			r.log.Info("the host or the definition of a template has changed; it is built again while the earlier one serves", "template", line.Template)
		case renewFailed:
			if r.state.usable(line.Template) != nil {
				r.log.Error("a damaged template cannot be built again, and no sandbox starts from it: correct the cause and run "+
					r.byHand(line.Template), "template", line.Template, "error", line.Message)
				continue
			}
			r.log.Warn("a template cannot be built again; the earlier one goes on to serve", "template", line.Template, "error", line.Message)
		case renewBuilt:
			r.log.Info("sandboxes start from the template that was built again", "template", line.Template, "digest", line.Message)
			select {
			case r.built <- line.Template:
			default: // the server is behind with the earlier names: the first create waits for a zygote
			}
		}
	}
}

// renewalGrace is how long a child that was told to end may take: pip and the compiler end with it.
const renewalGrace = 10 * time.Second

// close ends the child, unless finish is set and it is at work: then it ends by itself. A server that runs one command
// would else begin the same build each time and never end it.
func (r *renewal) close(finish bool) error {
	r.once.Do(func() { r.closed = r.end(finish) })
	return r.closed
}

func (r *renewal) end(finish bool) error {
	if finish && r.state.busy() {
		_, err := io.WriteString(r.stdin, renewFinish)
		return errors.Join(err, r.stdin.Close(), r.lines.Close(), r.cmd.Process.Release())
	}
	_ = r.stdin.Close() // it may have ended before
	ended := make(chan struct{})
	go func() {
		<-r.done
		_ = r.cmd.Wait() // its lines told how it went
		close(ended)
	}()
	late := time.NewTimer(renewalGrace)
	defer late.Stop()
	select {
	case <-ended:
		return nil
	case <-late.C:
		return errors.Join(errors.New("it does not end"), r.lines.Close())
	}
}

// prepare makes a template ready. One that does not work is built again, and does not keep the
// server from serving the others: followRenewal makes it ready then.
func (s *Server) prepare(ctx context.Context, m *sandbox.Manager, p parts, name string) error {
	err := m.Prepare(ctx, Tenant, name)
	if err == nil || !p.usable(name) {
		return nil
	}
	built, ok := p.templates.(builtTemplates)
	if !ok || !s.blames(ctx, err) {
		return err
	}
	s.repair(built, name, err)
	return nil
}

// blames tells whether the template is why it could not be made ready, and not the driver.
func (s *Server) blames(ctx context.Context, err error) bool {
	return ctx.Err() == nil && fault.Is(err, fault.Unavailable) && s.ready(ctx) == nil
}

// followRenewal makes each template that is built again ready: the first create from it would else
// wait for its zygote.
func (s *Server) followRenewal(m preparer, p parts, names []string) {
	built, ok := p.templates.(builtTemplates)
	if !ok || s.renewal == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.prepareRenewed(ctx, m, built, names)
	}()
	s.undo.add("stop warming templates that were built again", func() error {
		cancel()
		err := s.renewal.close(s.cfg.Ephemeral)
		<-done
		return err
	})
}

// preparer makes templates ready.
type preparer interface {
	Prepare(ctx context.Context, tenant, name string) error
}

// prepareRenewed makes those of names ready that are built again, and refuses one that does not
// work then either: another build would give the same.
func (s *Server) prepareRenewed(ctx context.Context, m preparer, t builtTemplates, names []string) {
	for name := range s.renewal.built {
		if !slices.Contains(names, name) {
			continue
		}
		switch err := m.Prepare(ctx, Tenant, name); {
		case err == nil || ctx.Err() != nil:
		case s.blames(ctx, err):
			s.refuse(t, name, fmt.Errorf("after it was built again: %w", err))
		default:
			s.log.Warn("template is not warm", "template", name, "error", err)
		}
	}
}

// errChanged is why a template is built again whose layers the maker found changed.
var errChanged = errors.New("its layers were changed after they were built")

// repairSpoilt has the templates built again whose layers the maker found changed.
func (s *Server) repairSpoilt(p parts) {
	built, ok := p.templates.(builtTemplates)
	if !ok || p.spoilt == nil {
		return
	}
	built.refresh()
	for name, digest := range p.spoilt() {
		if built.digest(name) == digest {
			s.repair(built, name, errChanged)
		}
	}
}

// withSpoilt is the driver's check, and repairs what it tells of templates.
func (s *Server) withSpoilt(p parts) func(context.Context) error {
	if p.spoilt == nil {
		return p.ready
	}
	return func(ctx context.Context) error {
		err := p.ready(ctx)
		s.repairSpoilt(p)
		return err
	}
}

// spoiltLook is how often the server asks the maker which templates are spoilt. The maker reads
// their content much less often.
const spoiltLook = time.Minute

// watchSpoilt has templates repaired also if no client asks for readiness.
func (s *Server) watchSpoilt(p parts) {
	if p.spoilt == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background()) // of this work, which the server's end ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(spoiltLook)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = s.ready(ctx) // /readyz and its log say how the maker is
			case <-ctx.Done():
				return
			}
		}
	}()
	s.undo.add("stop asking for spoilt templates", func() error { cancel(); <-done; return nil })
}

// renewMain is the child.
func renewMain(args []string, stdin io.Reader, out io.Writer) error {
	if len(args) < 2 || !filepath.IsAbs(args[0]) {
		return errors.New("want a directory and names of templates")
	}
	signal.Ignore(syscall.SIGPIPE)                          // of a server that has ended, and wants the build finished
	ctx, cancel := context.WithCancel(context.Background()) // ends with the server, see below
	defer cancel()
	var mu sync.Mutex // both the work and the orders say something
	say := func(name, state, message string) {
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(out).Encode(renewed{name, state, message}) // the server may be gone
	}
	orders := readOrders(stdin, cancel, say)
	store, err := template.Open(template.Options{Dir: args[0], Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	r := renewer{store: store, checker: store.Checker(), say: say, rebuilt: map[string]rebuilds{}}
	names := args[1:]
	bad := map[string]bool{}
	for _, name := range names {
		bad[name] = r.check(ctx, name)
	}
	say("", renewChecked, "")
	for _, name := range otherTemplates(store, names) {
		if r.check(ctx, name) {
			bad[name] = true
			names = append(names, name)
		}
	}
	for _, name := range names {
		j := renewalJob{name: name, damaged: bad[name], build: store.Ensure}
		if j.damaged {
			j.build = store.Repair
		}
		r.add(j)
	}
	return r.work(ctx, orders)
}

// maxOrders bounds how many orders wait, and tooManyOrders is why a further one fails.
const (
	maxOrders     = 64
	tooManyOrders = "too many templates wait to be built again"
)

// readOrders gives the names of templates that the server wants built again. The end of stdin is
// that of the server: it ends the work by stop, unless the server wants it finished.
//
// It never waits for the work, since it would then miss the end of stdin: an order beyond maxOrders
// fails.
func readOrders(stdin io.Reader, stop func(), say sayFunc) <-chan string {
	names := make(chan string, maxOrders)
	go func() {
		defer close(names)
		for lines := bufio.NewScanner(stdin); lines.Scan(); {
			name, rebuild := strings.CutPrefix(lines.Text(), renewRebuild)
			switch {
			case lines.Text()+"\n" == renewFinish:
				return
			case !rebuild:
			case len(names) == maxOrders:
				say(name, renewFailed, tooManyOrders)
			default:
				names <- name
			}
		}
		stop()
	}()
	return names
}

// otherTemplates are the built templates of the operator beyond names. They are built again if they are
// damaged, and not if the host has changed.
func otherTemplates(store *template.Store, names []string) (others []string) {
	for _, t := range store.List() {
		if t.Digest != "" && !slices.Contains(names, t.Name) {
			others = append(others, t.Name)
		}
	}
	return others
}

// renewer builds templates again, one after another.
type renewer struct {
	store   renewalStore
	checker *template.Checker
	say     sayFunc
	queue   []*renewalJob       // by urgency
	rebuilt map[string]rebuilds // by template: what was built because the server wanted it
}

// sayFunc tells the server the state of a template.
type sayFunc func(name, state, message string)

// renewalStore is what a renewer needs of a template.Store.
type renewalStore interface {
	Resolve(ctx context.Context, name string) (*template.Template, error)
	Rebuild(ctx context.Context, name string, progress func(template.Progress)) (*template.Template, error)
	Refresh() error
}

// renewalJob is a template that waits to be built.
type renewalJob struct {
	name     string
	ordered  bool // the server wants it
	damaged  bool // no sandbox starts from the template until it is built
	build    buildFunc
	building func() // says once that the build has begun
	tries    int
	due      time.Time
}

// buildFunc builds a template by its name.
type buildFunc func(ctx context.Context, name string, progress func(template.Progress)) (*template.Template, error)

// check tells whether a template is damaged.
func (r *renewer) check(ctx context.Context, name string) (damaged bool) {
	found, err := r.checker.Check(ctx, name)
	for layer, why := range found {
		r.say(name, renewDamaged, fmt.Sprintf("layer %s: %s", layer, why))
	}
	if err != nil && ctx.Err() == nil {
		r.say(name, renewDamaged, err.Error())
	}
	return len(found) > 0 || err != nil
}

// How long a template rests after the server had it built, before the server may again. The rest
// doubles each time, up to rebuildRestMax: a server that was taken over must not fill the disk, and
// a template that is damaged again and again is not repaired by building it. A template that was
// whole for two of the longest rests begins anew.
const (
	rebuildRest    = 10 * time.Minute
	rebuildRestMax = 24 * time.Hour
)

// rebuilds are the builds of one template that the server wanted.
type rebuilds struct {
	times int
	last  time.Time
}

// rest is how much longer the template rests.
func (b rebuilds) rest(now time.Time) time.Duration {
	if b.times == 0 {
		return 0
	}
	all := rebuildRestMax
	if doubled := b.times - 1; doubled < 8 { // 2^8 times rebuildRest is more than the longest rest
		all = min(rebuildRest<<doubled, rebuildRestMax)
	}
	return max(0, all-now.Sub(b.last))
}

// next is b with one build more.
func (b rebuilds) next(now time.Time) rebuilds {
	if now.Sub(b.last) > 2*rebuildRestMax {
		b.times = 0
	}
	return rebuilds{b.times + 1, now}
}

// work builds what waits, and what the server orders until it ends.
func (r *renewer) work(ctx context.Context, orders <-chan string) error {
	take := func(name string, more bool) {
		if !more {
			orders = nil
			return
		}
		r.order(name)
	}
	for ctx.Err() == nil && (orders != nil || len(r.queue) > 0) {
		select { // an order is of a damaged template: it comes before a job that is due
		case name, more := <-orders:
			take(name, more)
			continue
		default:
		}
		var due <-chan time.Time
		if len(r.queue) > 0 {
			due = time.After(time.Until(r.queue[0].due))
		} else {
			debug.FreeOSMemory() // the wait for an order may take days
		}
		select {
		case name, more := <-orders:
			take(name, more)
		case <-due:
			next := r.queue[0]
			r.queue = r.queue[1:]
			r.try(ctx, next)
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// order takes up a template that the server wants built again.
func (r *renewer) order(name string) {
	waiting := 0
	for _, j := range r.queue {
		if j.ordered && j.name == name {
			return
		}
		if j.ordered {
			waiting++
		}
	}
	rest := r.rebuilt[name].rest(time.Now())
	switch {
	case rest > 0:
		r.say(name, renewFailed, fmt.Sprintf("it was built again and is damaged again: the next order to build it is taken in %v", rest.Round(time.Second)))
	case waiting == maxOrders:
		r.say(name, renewFailed, tooManyOrders)
	default: // Rebuild does what Ensure and Repair do
		r.queue = slices.DeleteFunc(r.queue, func(j *renewalJob) bool { return j.name == name })
		r.add(renewalJob{name: name, ordered: true, damaged: true, build: r.rebuild})
	}
}

// rebuild builds a template again for the server. A try that waited in vain for the host's package
// manager built nothing and does not count.
func (r *renewer) rebuild(ctx context.Context, name string, progress func(template.Progress)) (*template.Template, error) {
	if err := r.store.Refresh(); err != nil { // definitions may have changed since
		return nil, err
	}
	t, err := r.store.Rebuild(ctx, name, progress)
	if !errors.Is(err, template.ErrDpkgBusy) && !fault.Is(err, fault.NotFound) {
		r.rebuilt[name] = r.rebuilt[name].next(time.Now())
	}
	return t, err
}

// renewTries is how often a template is built while the host's package manager is busy: for about
// an hour, since each try waits for it too. renewPause is the time between two tries, a variable
// for tests.
const renewTries = 30

var renewPause = time.Minute

// add has a template built.
func (r *renewer) add(j renewalJob) {
	j.due = time.Now()
	j.building = sync.OnceFunc(func() { r.say(j.name, renewBuilding, "") })
	r.enqueue(&j)
}

// enqueue orders the queue: damaged templates before outdated ones, which go on to serve, and each
// kind by when it is due.
func (r *renewer) enqueue(j *renewalJob) {
	r.queue = append(r.queue, j)
	slices.SortStableFunc(r.queue, func(a, b *renewalJob) int {
		switch {
		case a.damaged == b.damaged:
			return a.due.Compare(b.due)
		case a.damaged:
			return -1
		}
		return 1
	})
}

// try builds a template and says how that went.
//
// While the host's package manager is busy it says nothing, and the job waits for another try. An
// upgrade of the host takes longer than a build waits for it, and without another try the template
// would be built at the server's next start only.
func (r *renewer) try(ctx context.Context, j *renewalJob) {
	before := ""
	if t, err := r.store.Resolve(ctx, j.name); err == nil {
		before = t.Digest
	}
	t, err := j.build(ctx, j.name, func(p template.Progress) {
		if p.Step != template.StepWait && p.Step != template.StepPython {
			j.building()
		}
	})
	j.tries++
	switch {
	case ctx.Err() != nil: // the server ends
	case errors.Is(err, template.ErrDpkgBusy) && j.tries < renewTries:
		j.due = time.Now().Add(renewPause)
		r.enqueue(j)
	case err != nil:
		r.say(j.name, renewFailed, strings.ToValidUTF8(err.Error(), "?"))
	case t.Digest != before:
		r.say(j.name, renewBuilt, t.Digest)
	default:
		r.say(j.name, renewCurrent, "")
	}
}

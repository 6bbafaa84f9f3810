// Package native is the driver for this host: namespaces, cgroups, overlays and zygotes, without Docker and without
// KVM. It holds no privilege of its own: it asks the maker, and speaks to agents over the channels it is given.
package native

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Config of the driver.
type Config struct {
	DataDir string
	Log     *slog.Logger
	// Launch starts a maker for this data directory; nil: one must be running already.
	Launch func(ctx context.Context, dataDir string) error
}

// Driver speaks to one maker.
type Driver struct {
	cfg   Config
	path  string
	hello wire.Hello // of the maker that Open found

	mu       sync.Mutex
	closed   bool
	answered wire.Hello // of the maker that answered Open or the last successful Ready
	idle     []*net.UnixConn
	channels map[string]*channel
	prepared map[string]bool     // by tenant and digest
	living   map[string]struct{} // sandboxes that this maker was seen with
}

// channel is the way to one agent.
type channel struct {
	mu   sync.Mutex
	conn *net.UnixConn
}

// Open finds the maker or has one started, and checks that it speaks our protocol.
func Open(ctx context.Context, cfg Config) (*Driver, error) {
	dir, err := filepath.Abs(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	d := &Driver{cfg: cfg, path: maker.SocketPath(dir), channels: map[string]*channel{}, prepared: map[string]bool{}, living: map[string]struct{}{}}
	if err := d.greet(ctx); err != nil {
		if cfg.Launch == nil {
			return nil, fault.Wrap(fault.Unavailable, err, "no maker runs for %s", dir)
		}
		if err := cfg.Launch(ctx, dir); err != nil {
			return nil, fmt.Errorf("start maker: %w", err)
		}
		if err := d.greet(ctx); err != nil {
			return nil, err
		}
	}
	if d.hello.Version != wire.Version {
		return nil, fault.New(fault.Conflict,
			"a maker of another version (%d, this server speaks %d) runs here with its sandboxes; end it with: cove maker stop --data-dir %s", d.hello.Version, wire.Version, dir)
	}
	return d, nil
}

func (d *Driver) greet(ctx context.Context) error {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpHello})
	if err != nil {
		return err
	}
	if r.Hello == nil {
		return errors.New("the maker did not introduce itself")
	}
	d.hello, d.answered = *r.Hello, *r.Hello
	return nil
}

// MakerPID is the process id of the maker that answered Open or the last successful Ready.
func (d *Driver) MakerPID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.answered.PID
}

// Spoilt are templates whose layers the maker found changed, as of Open or the last successful
// Ready: digests by name.
func (d *Driver) Spoilt() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.answered.Spoilt
}

// Caps of this driver.
func (d *Driver) Caps() sandbox.Caps {
	return sandbox.Caps{
		Name: "native", Isolation: "namespaces", WarmKernels: true, Limits: true, Network: d.hello.Network, Disk: d.hello.Disk, Fork: true,
		Pause: d.hello.Freezer, Snapshot: true, Images: true, Mounts: true,
	}
}

// Prepare sends a template to the maker and waits for its zygote.
func (d *Driver) Prepare(ctx context.Context, tenant string, t *template.Template) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpPrepare, Tenant: tenant, Template: t.Name, ID: t.Digest})
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prepared[tenant+"/"+t.Digest] = true
	return nil
}

func (d *Driver) isPrepared(tenant, digest string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.prepared[tenant+"/"+digest]
}

// Start makes a sandbox.
func (d *Driver) Start(ctx context.Context, r sandbox.StartRequest) error {
	if !d.isPrepared(r.Tenant, r.Template.Digest) {
		if err := d.Prepare(ctx, r.Tenant, r.Template); err != nil {
			return err
		}
	}
	ask := wire.Request{Op: wire.OpStart, Start: &wire.Start{
		ID: r.ID, Tenant: r.Tenant, Digest: r.Template.Digest, Limits: r.Limits, Network: r.Network, Storage: r.Storage, Env: r.Env, Deadline: r.Deadline,
		Mounts: r.Mounts,
	}}
	response, files, err := d.call(ctx, ask)
	if fault.Is(err, fault.NotFound) {
		// The maker has put the template away since, or is another one.
		if err := d.Prepare(ctx, r.Tenant, r.Template); err != nil {
			return err
		}
		response, files, err = d.call(ctx, ask)
	}
	if err != nil && ctx.Err() != nil && !fault.Is(err, fault.Conflict) {
		return d.abandon(r.ID, err) // it may have been there before the maker could hear that nobody wants it
	}
	if err != nil {
		return err
	}
	d.remember(r.ID)
	if err := d.keepChannel(r.ID, files); err != nil {
		return d.abandon(r.ID, err)
	}
	if r.Template.Python.Executable == "" || response.Waited {
		return nil // no kernel, or one that has nothing to do before it takes cells
	}
	ctx, cancel := context.WithTimeoutCause(ctx, kernelTime, fault.New(fault.Timeout, "the kernel did not start within %v", kernelTime))
	defer cancel()
	agent := d.agent(r.ID)
	if response.Token == "" {
		if _, err := agent.KernelStart(ctx, agentapi.KernelStartParams{Kernel: agentapi.DefaultKernel, Language: "python"}); err != nil {
			return d.abandon(r.ID, err)
		}
	}
	if err := awaitKernel(ctx, agent, agentapi.DefaultKernel, response.Token); err != nil {
		return d.abandon(r.ID, err)
	}
	return nil
}

// kernelTime is how long a kernel may take to start; a cold one with large imports takes seconds.
const kernelTime = 60 * time.Second

func awaitKernel(ctx context.Context, agent *agentapi.Client, name, token string) error {
	k, err := agent.KernelWait(ctx, agentapi.KernelParams{Kernel: name, Token: token})
	if err != nil {
		return err
	}
	if k.State == agentapi.KernelDead {
		return fault.New(fault.Unavailable, "the kernel did not start: %s", k.Message)
	}
	return nil
}

// abandon stops a sandbox whose start failed; the caller's context may be what failed, so it gets its own.
func (d *Driver) abandon(id string, cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), abandonTime)
	defer cancel()
	return errors.Join(cause, d.stop(ctx, id, sandbox.CauseStartFail, sandbox.StartFailure(cause)))
}

// abandonTime is how long the end of a sandbox whose start failed is waited for.
const abandonTime = 50 * time.Second

func (d *Driver) agent(id string) *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, id) })
}

// Dial opens a connection to the agent: a socket pair, one end of which goes through the channel.
func (d *Driver) Dial(ctx context.Context, id string) (net.Conn, error) {
	return d.dial(ctx, id, agentapi.MessageConn)
}

// dial brings the agent a connection, and what else a message of that type carries.
func (d *Driver) dial(ctx context.Context, id string, kind agentapi.MessageType, more ...*os.File) (net.Conn, error) {
	for attempt := 0; ; attempt++ {
		c, err := d.channel(ctx, id)
		if err != nil {
			return nil, err
		}
		conn, err := c.dial(ctx, kind, more)
		if err == nil {
			return conn, nil
		}
		d.dropChannel(id, c)
		if attempt == 1 || ctx.Err() != nil {
			return nil, fault.Wrap(fault.Gone, err, "sandbox %s does not answer", id)
		}
	}
}

func (c *channel) dial(ctx context.Context, kind agentapi.MessageType, more []*os.File) (net.Conn, error) {
	mine, theirs, err := wire.Pair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	c.mu.Lock()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(10 * time.Second)
	}
	_ = c.conn.SetWriteDeadline(deadline)
	err = wire.Send(c.conn, agentapi.Message{Type: kind}, append([]*os.File{theirs}, more...)...)
	c.mu.Unlock()
	if err != nil {
		mine.Close()
		return nil, err
	}
	return wire.Conn(mine)
}

// channel gives the one we have to an agent, or asks the maker for one: after a restart of the server.
func (d *Driver) channel(ctx context.Context, id string) (*channel, error) {
	d.mu.Lock()
	c := d.channels[id]
	d.mu.Unlock()
	if c != nil {
		return c, nil
	}
	_, files, err := d.call(ctx, wire.Request{Op: wire.OpChannel, ID: id})
	if err != nil {
		return nil, err
	}
	if err := d.keepChannel(id, files); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.channels[id]; c != nil {
		return c, nil
	}
	return nil, fault.New(fault.Gone, "sandbox %s has ended", id)
}

func (d *Driver) keepChannel(id string, files []*os.File) error {
	if len(files) != 1 {
		wire.CloseAll(files)
		return fmt.Errorf("the maker gave %d descriptors, not one", len(files))
	}
	conn, err := wire.Conn(files[0])
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.channels[id] != nil {
		conn.Close()
		return nil
	}
	d.channels[id] = &channel{conn: conn}
	return nil
}

func (d *Driver) dropChannel(id string, c *channel) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c == nil || d.channels[id] == c {
		if c = d.channels[id]; c != nil {
			c.conn.Close()
		}
		delete(d.channels, id)
	}
}

// Kernel forks a kernel into a sandbox.
func (d *Driver) Kernel(ctx context.Context, id, kernel string) error {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpKernel, ID: id, Kernel: kernel})
	if err != nil {
		return err
	}
	return awaitKernel(ctx, d.agent(id), kernel, r.Token)
}

// Change adjusts a living sandbox.
func (d *Driver) Change(ctx context.Context, id string, c sandbox.Change) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpChange, ID: id, Change: &wire.Change{Deadline: c.Deadline, Network: c.Network, Limits: c.Limits}})
	return err
}

// Usage of a living sandbox.
func (d *Driver) Usage(ctx context.Context, id string) (sandbox.Usage, error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpUsage, ID: id})
	if err != nil || r.Usage == nil {
		return sandbox.Usage{}, err
	}
	return *r.Usage, nil
}

// Stop ends a sandbox.
func (d *Driver) Stop(ctx context.Context, id string, cause sandbox.Cause) error {
	return d.stop(ctx, id, cause, "")
}

func (d *Driver) stop(ctx context.Context, id string, cause sandbox.Cause, message string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpStop, ID: id, Cause: cause, Message: message})
	d.dropChannel(id, nil)
	return err
}

func (d *Driver) remember(ids ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		d.living[id] = struct{}{}
	}
}

// List gives everything that lives.
func (d *Driver) List(ctx context.Context) ([]sandbox.Instance, error) {
	var all []sandbox.Instance
	after := ""
	for {
		r, _, err := d.call(ctx, wire.Request{Op: wire.OpList, After: after})
		if err != nil {
			return nil, err
		}
		if len(r.Instances) == 0 {
			return all, nil
		}
		all = append(all, r.Instances...)
		for _, i := range r.Instances {
			d.remember(i.ID)
		}
		after = r.Instances[len(r.Instances)-1].ID
	}
}

// Ended yields ends until ctx ends or the maker is gone.
func (d *Driver) Ended(ctx context.Context) iter.Seq2[sandbox.Ended, error] {
	return func(yield func(sandbox.Ended, error) bool) {
		c, err := d.connect(ctx)
		if err != nil {
			d.mourn(ctx, err, yield) // it may have died before anybody listened
			return
		}
		defer c.Close()
		defer context.AfterFunc(ctx, func() { c.Close() })()
		if err := wire.Send(c, wire.Request{Op: wire.OpEnded}); err != nil {
			d.mourn(ctx, err, yield)
			return
		}
		for {
			var r wire.Response
			_, err := wire.Receive(c, &r)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				d.mourn(ctx, err, yield)
				return
			}
			if r.Ended != nil {
				d.dropChannel(r.Ended.ID, nil)
				d.mu.Lock()
				delete(d.living, r.Ended.ID)
				d.mu.Unlock()
				if !yield(*r.Ended, nil) {
					return
				}
			}
		}
	}
}

// mourn tells of the sandboxes that died with the maker, and then why the stream is over.
func (d *Driver) mourn(ctx context.Context, err error, yield func(sandbox.Ended, error) bool) {
	if ctx.Err() != nil {
		return
	}
	for _, id := range d.bury(ctx) {
		end := sandbox.Ended{ID: id, Cause: sandbox.CauseMakerDied, Message: "the maker ended, and its sandboxes with it", At: time.Now()}
		if !yield(end, nil) {
			return
		}
	}
	yield(sandbox.Ended{}, fault.Wrap(fault.Unavailable, err, "the maker is gone"))
}

// bury finds out whether the maker is dead or only a connection to it, and gives the sandboxes that died with it. What
// was known of the dead one is forgotten.
func (d *Driver) bury(ctx context.Context) []string {
	before := d.hello.PID
	d.dropIdle()
	if r, _, err := d.call(ctx, wire.Request{Op: wire.OpHello}); err == nil && r.Hello != nil && r.Hello.PID == before {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	dead := slices.Sorted(maps.Keys(d.living))
	for _, c := range d.channels {
		c.conn.Close()
	}
	d.channels, d.prepared, d.living = map[string]*channel{}, map[string]bool{}, map[string]struct{}{}
	return dead
}

// dropIdle closes the connections that wait for a request: they may be those of a maker that has ended.
func (d *Driver) dropIdle() {
	d.mu.Lock()
	idle := d.idle
	d.idle = nil
	d.mu.Unlock()
	for _, c := range idle {
		c.Close()
	}
}

// Ready tells whether sandboxes can be made. A failure is asked again on a new connection: another maker may run by now.
func (d *Driver) Ready(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel(nil)
	watch.Go(func() { d.watchStopped(ctx, cancel) })
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpHello})
	if err != nil && ctx.Err() == nil {
		d.dropIdle()
		r, _, err = d.call(ctx, wire.Request{Op: wire.OpHello})
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil && r.Hello != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.answered = *r.Hello
	}
	return err
}

// stoppedLook is how often watchStopped looks at the maker.
const stoppedLook = 200 * time.Millisecond

// watchStopped cancels a request that the maker cannot answer because its process is stopped, by a
// signal or a debugger: the kernel still takes connections for it. Two looks must see that, since a
// tracer stops its process for a moment at every system call.
func (d *Driver) watchStopped(ctx context.Context, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(stoppedLook)
	defer tick.Stop()
	for stopped := false; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		before := stopped
		pid := d.MakerPID()
		stopped = isStopped(pid)
		if before && stopped {
			cancel(fault.Wrap(fault.Unavailable, fmt.Errorf("kill -CONT %d lets it continue", pid), "the maker is stopped"))
			return
		}
	}
}

// isStopped tells whether a process is stopped.
func isStopped(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// The state follows the program's name, which is in parentheses and may hold any character.
	_, rest, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}

// Forget lets the maker drop ends that were written down.
func (d *Driver) Forget(ctx context.Context, ids ...string) error {
	_, _, err := d.call(ctx, wire.Request{Op: wire.OpForget, IDs: ids})
	return err
}

// Stats counts what the maker holds.
func (d *Driver) Stats(ctx context.Context) (wire.Stats, error) {
	r, _, err := d.call(ctx, wire.Request{Op: wire.OpStats})
	if err != nil || r.Stats == nil {
		return wire.Stats{}, err
	}
	return *r.Stats, nil
}

// Floor measures a plain fork of a template's zygote: it returns when the child says that it is ready.
func (d *Driver) Floor(ctx context.Context, tenant, digest string) (io.Closer, error) {
	_, files, err := d.call(ctx, wire.Request{Op: wire.OpFloor, Tenant: tenant, ID: digest})
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		wire.CloseAll(files)
		return nil, errors.New("the maker gave no descriptor")
	}
	conn, err := wire.Conn(files[0])
	if err != nil {
		return nil, err
	}
	if _, err := agentapi.NewReader(conn).Read(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("floor: %w", err)
	}
	return conn, nil
}

// Shutdown ends every sandbox and the maker, and returns when it is gone.
func (d *Driver) Shutdown(ctx context.Context) error {
	c, err := d.connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return maker.Shutdown(ctx, c)
}

// Close lets go; the maker and its sandboxes live on.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, c := range d.idle {
		c.Close()
	}
	for _, c := range d.channels {
		c.conn.Close()
	}
	d.idle, d.channels = nil, map[string]*channel{}
	return nil
}

// call sends one request and waits for its answer. A caller that leaves closes the connection, and the maker takes
// back what nobody will hear about.
func (d *Driver) call(ctx context.Context, r wire.Request) (wire.Response, []*os.File, error) {
	c, err := d.take(ctx)
	if err != nil {
		return wire.Response{}, nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	var response wire.Response
	err = wire.Send(c, r)
	var files []*os.File
	if err == nil {
		files, err = wire.Receive(c, &response)
	}
	if !stop() {
		wire.CloseAll(files)
		return wire.Response{}, nil, context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return wire.Response{}, nil, fault.Wrap(fault.Unavailable, err, "the maker does not answer")
	}
	d.give(c)
	if err := response.Err(); err != nil {
		wire.CloseAll(files)
		return wire.Response{}, nil, err
	}
	return response, files, nil
}

func (d *Driver) take(ctx context.Context) (*net.UnixConn, error) {
	d.mu.Lock()
	if n := len(d.idle); n > 0 {
		c := d.idle[n-1]
		d.idle = d.idle[:n-1]
		d.mu.Unlock()
		return c, nil
	}
	d.mu.Unlock()
	return d.connect(ctx)
}

const maxIdle = 8

func (d *Driver) give(c *net.UnixConn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.idle) >= maxIdle {
		c.Close()
		return
	}
	d.idle = append(d.idle, c)
}

func (d *Driver) connect(ctx context.Context) (*net.UnixConn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unixpacket", d.path)
	if err != nil {
		// The whole command is for the log: tenants are not told where the data directory is.
		dir := filepath.Dir(filepath.Dir(d.path))
		command := fmt.Errorf("sudo %s maker --data-dir %s --server-uid %d: %w", os.Args[0], dir, os.Getuid(), err)
		return nil, fault.Wrap(fault.Unavailable, command, "the maker is not running: restart the server, or start one with `sudo cove maker --data-dir DIR`, where DIR is the server's data directory; the server's log has the whole command")
	}
	return c.(*net.UnixConn), nil
}

// Package kubernetes is the driver for clusters: a sandbox is a Pod, taken from a pool of Pods that wait or made for it. It knows Pods, Leases and
// NetworkPolicies and no database: whatever it must remember, Pods remember. Any number of servers may use one namespace; each may claim, and the
// one that holds the Lease keeps the pools full.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Config says which cluster, and what its Pods are.
type Config struct {
	Kubeconfig   string // empty: the cluster that this process runs in, else the user's own
	Namespace    string // of the Pods; empty: the kubeconfig's
	Image        string // Cove's own, which brings the program into every Pod
	PullPolicy   string // of that image
	Owner        string // this server among others: the name of its Pod
	Templates    map[string]Template
	Images       *Template     // what Pods are besides whose image a tenant names; nil: tenants name none
	PullKinds    bool          // a tenant whose image cannot be pulled is told what kind of failure it was: it names registries that the operator has chosen
	RuntimeClass string        // where a template says none
	Nameservers  []string      // of sandboxes; empty: those of their node
	StartTimeout time.Duration // how long a start may take; zero: a minute
	// Policies: NetworkPolicies are made and relied on. Without, sandboxes reach whatever the cluster lets them reach.
	Policies bool
	Rules    policy.Rules // the operator's, for networks of sandboxes
	// Servers selects the Pods that may connect to sandboxes; ServerRanges are addresses that may, for servers outside the cluster.
	Servers         map[string]string
	ServerNamespace string // of those Pods; empty: any
	ServerRanges    []netip.Prefix

	Rest *rest.Config // instead of Kubeconfig
	Log  *slog.Logger
}

// Driver implements sandbox.Driver.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	api    *client
	agents *podapi.Client
	view   *view
	kinds  map[string]*kind
	images *kind // what Pods of tenants' images are like; nil: there are none
	lease  *lease
	keeper *keeper // used by the leader's goroutine alone
	pulls  pulls
	// installation is what every Pod is made from besides its template.
	installation []string

	life context.Context // of everything that runs beside; Close ends it
	stop context.CancelFunc
	work sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	living   map[string]*living      // sandboxes that this server has touched, by id
	reserved map[types.UID]time.Time // Pods that somebody here is about to claim, or has lost, and since when
	ends     ends
	timers   map[types.UID]*time.Timer // deadlines of sandboxes that this server claimed
}

var _ sandbox.Driver = (*Driver)(nil)

// syncFor bounds how long the first list of Pods may take.
const syncFor = time.Minute

// quiet has the client's library log where we do. It has one logger for the whole process.
var quiet sync.Once

// New connects to the cluster and returns when it knows every Pod.
func New(ctx context.Context, cfg Config) (_ *Driver, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.StartTimeout == 0 {
		cfg.StartTimeout = time.Minute
	}
	quiet.Do(func() { klog.SetSlogLogger(cfg.Log) })
	api, err := connect(&cfg)
	if err != nil {
		return nil, err
	}
	d := &Driver{
		cfg: cfg, log: cfg.Log, api: api, kinds: map[string]*kind{}, living: map[string]*living{}, reserved: map[types.UID]time.Time{},
		timers: map[types.UID]*time.Timer{}, ends: newEnds(), keeper: newKeeper(), pulls: pulls{of: map[string]*turn{}}, lease: newLease(api, cfg.Owner, cfg.Log),
	}
	authority, err := d.authority(ctx)
	if err != nil {
		return nil, err
	}
	d.agents = podapi.NewClient(authority, cfg.Owner)
	d.installation = []string{cfg.Image, cfg.PullPolicy, cfg.RuntimeClass, fmt.Sprint(cfg.Nameservers), string(authority.Certificate)}
	if err := d.describe(); err != nil {
		return nil, err
	}
	if err := d.ensurePolicies(ctx); err != nil {
		return nil, err
	}
	if d.view, err = newView(api); err != nil {
		return nil, err
	}
	d.life, d.stop = context.WithCancel(context.Background()) // the driver's own, until Close
	if err := d.run(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// describe completes what Pods are made from.
func (d *Driver) describe() error {
	for name, t := range d.cfg.Templates {
		k, err := newKind(name, t, d.installation...)
		if err != nil {
			return err
		}
		d.kinds[name] = k
	}
	if d.cfg.Images == nil {
		return nil
	}
	like := *d.cfg.Images
	like.Image = imagesName
	var err error
	if d.images, err = d.newImageKind(imagesName, like); err != nil {
		return fmt.Errorf("kubernetes.images: %w", err)
	}
	return nil
}

// connect checks what does not depend on the cluster, and finds the cluster.
func connect(cfg *Config) (*client, error) {
	if len(cfg.Templates) == 0 {
		return nil, errors.New("there is no template: describe at least one in [kubernetes.templates.NAME], with its image")
	}
	if cfg.Image == "" || cfg.Owner == "" {
		return nil, errors.New("kubernetes needs the image of Cove itself (kubernetes.image) and a name for this server")
	}
	if cfg.Rest == nil {
		found, namespace, err := restConfig(cfg.Kubeconfig)
		if err != nil {
			return nil, err
		}
		cfg.Rest, cfg.Namespace = found, orElse(cfg.Namespace, namespace)
	}
	if cfg.Namespace == "" {
		return nil, errors.New("kubernetes.namespace is missing: where the Pods of sandboxes are made")
	}
	return newClient(cfg.Rest, cfg.Namespace)
}

// run starts what goes on beside and waits until every Pod is known.
func (d *Driver) run(ctx context.Context) error {
	handler, err := d.view.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: d.seen, UpdateFunc: func(_, pod any) { d.seen(pod) }, DeleteFunc: d.gone,
	})
	if err != nil {
		return err
	}
	d.work.Go(func() { d.view.informer.Run(d.life.Done()) })
	ctx, cancel := context.WithTimeout(ctx, syncFor)
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return errors.New("the API server did not list the Pods of its namespace in time; is the address right, and may the service account list Pods?")
	}
	d.work.Go(func() { d.lease.run(d.life) })
	d.work.Go(func() { d.lease.work(d.life, d.lead) })
	return nil
}

// Caps says what a Pod can give. A hardened Pod has no sudo; which templates are looser is the operator's choice.
func (d *Driver) Caps() sandbox.Caps {
	return sandbox.Caps{Name: "kubernetes", Isolation: "pod", WarmKernels: true, Limits: true, Network: d.cfg.Policies, Disk: "ephemeral", Pulls: d.images != nil}
}

// Templates are what sandboxes can be made of.
func (d *Driver) Templates() []*template.Template {
	var list []*template.Template
	for _, name := range slices.Sorted(maps.Keys(d.kinds)) {
		list = append(list, d.kinds[name].domain)
	}
	return list
}

func (d *Driver) kind(t *template.Template) (*kind, error) {
	if t != nil && d.kinds[t.Name] != nil {
		return d.kinds[t.Name], nil
	}
	if t != nil && t.Image != nil {
		return d.imageKind(t)
	}
	return nil, fault.New(fault.NotFound, "this server has no such template; there are %v", slices.Sorted(maps.Keys(d.kinds)))
}

// warmFor bounds how long a server waits at its start for a Pod that waits: it serves without one, only slower.
const warmFor = 30 * time.Second

// Prepare returns when a Pod of the template waits, or when that takes too long.
func (d *Driver) Prepare(ctx context.Context, _ string, t *template.Template) error {
	k, err := d.kind(t)
	if err != nil || k.Pool == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, warmFor)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for len(d.view.by(indexIdle, k.digest)) == 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			d.log.Warn("no Pod of the template is ready yet: the first sandboxes will take longer", "template", k.name)
			return nil
		}
	}
	return nil
}

// Ready asks the API server whether sandboxes can be made.
func (d *Driver) Ready(ctx context.Context) error {
	return d.api.core.Get().AbsPath("/readyz").Do(ctx).Error()
}

// Close lets go of the cluster; Pods live on.
func (d *Driver) Close() error {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.ends.wake()
	for uid, timer := range d.timers {
		timer.Stop()
		delete(d.timers, uid)
	}
	d.mu.Unlock()
	if !closed {
		d.stop()
	}
	d.work.Wait()
	return nil
}

var errMemory = fault.New(fault.Unsupported, "a Pod's memory can neither be copied nor kept: use the native driver for that")

// Fork is not possible here.
func (d *Driver) Fork(context.Context, sandbox.ForkRequest) (sandbox.Forked, error) {
	return sandbox.Forked{}, errMemory
}

// Pause is not possible here.
func (d *Driver) Pause(context.Context, string) error { return errMemory }

// Resume is not possible here.
func (d *Driver) Resume(context.Context, string) error { return errMemory }

var errTemplates = fault.New(fault.Unsupported, "templates of this server are images that its operator names; build an image and add it to the configuration")

// Snapshot is not possible here.
func (d *Driver) Snapshot(context.Context, sandbox.SnapshotRequest) (*template.Template, error) {
	return nil, errTemplates
}

// RemoveTemplate is not possible here: templates are the operator's, and of images nothing is kept.
func (d *Driver) RemoveTemplate(context.Context, string, string) error { return errTemplates }

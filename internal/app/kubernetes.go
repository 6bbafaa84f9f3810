package app

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// openKubernetes connects to the cluster that sandboxes run on.
func openKubernetes(ctx context.Context, cfg config.Config, documents documents, log *slog.Logger) (parts, error) {
	k := cfg.Kubernetes
	me, err := k.Me()
	if err != nil {
		return parts{}, err
	}
	ranges, err := k.Ranges()
	if err != nil {
		return parts{}, err
	}
	private, err := cfg.Network.PrivateNetworks(policy.EveryTenant)
	if err != nil {
		return parts{}, err
	}
	kinds := map[string]kubernetes.Template{}
	for name, t := range k.Templates {
		kinds[name] = kubernetesTemplate(t)
	}
	var images *kubernetes.Template
	if k.Images.Enabled {
		like := kubernetesImages(k.Images)
		images = &like
	}
	d, err := kubernetes.New(ctx, kubernetes.Config{
		Kubeconfig: k.Kubeconfig, Namespace: k.Namespace, Image: k.Image, PullPolicy: k.PullPolicy, Owner: me, Templates: kinds, Images: images,
		PullKinds:    len(k.Images.Allow) > 0,
		StartTimeout: cfg.Sandbox.StartTimeout, RuntimeClass: k.RuntimeClass, Nameservers: k.Nameservers, Policies: k.Policies, Servers: k.Servers, ServerNamespace: k.ServerSpace, ServerRanges: ranges, Log: log,
		Rules: policy.Rules{Private: private},
	})
	if err != nil {
		return parts{}, err
	}
	kept := clusterImages{d, kubernetesPulls(k.Images).Allows, documents, log}
	return parts{
		driver: clusterDriver{d, kept}, templates: newClusterTemplates(d.Templates(), defaultTemplate(cfg), kept), close: d.Close, ready: d.Ready,
		lost: sandbox.Ended{Cause: sandbox.CauseDeleted, Message: "its Pod was deleted while no server watched"},
	}, nil
}

func kubernetesTemplate(t config.KubernetesTemplate) kubernetes.Template {
	made := kubernetes.Template{
		Image: t.Image, PullPolicy: t.PullPolicy, PullSecrets: t.PullSecrets, Description: t.Description, Pool: t.Pool, Env: t.Env, UID: t.UID, User: t.User,
		Home: t.Home, Workdir: t.Workdir, Python: t.Python, Preload: t.Preload, Warmup: t.Warmup, UserSite: t.UserSite, CPUs: t.CPUs, CPURequest: t.CPURequest,
		Memory: int64(t.Memory), MemRequest: int64(t.MemoryRequest), Disk: int64(t.Disk), Writable: t.Writable, WritableRoot: t.WritableRoot, Looser: t.Looser,
		RuntimeClass: t.RuntimeClass, NodeSelector: t.NodeSelector,
	}
	if t.UserNamespace {
		made.HostUsers = new(bool)
	}
	return made
}

// kubernetesPulls is what the operator of a cluster decides about images that its nodes pull.
func kubernetesPulls(i config.KubernetesImages) image.Pulls {
	return image.Pulls{Allow: i.Allow, Credentials: len(i.PullSecrets) > 0, Off: fault.Message(kubernetes.ErrImages)}
}

func kubernetesImages(i config.KubernetesImages) kubernetes.Template {
	return kubernetesTemplate(config.KubernetesTemplate{
		PullSecrets: i.PullSecrets, Env: i.Env, UID: i.UID, CPUs: i.CPUs, CPURequest: i.CPURequest, Memory: i.Memory, MemoryRequest: i.MemoryRequest,
		Disk: i.Disk, Writable: i.Writable, WritableRoot: i.WritableRoot, Looser: i.Looser, RuntimeClass: i.RuntimeClass, UserNamespace: i.UserNamespace,
		NodeSelector: i.NodeSelector,
	})
}

// clusterTemplates are those that the operator describes, of which nothing is built here, and the images of tenants.
type clusterTemplates struct {
	byName   map[string]*template.Template
	standard string
	images   clusterImages
}

func newClusterTemplates(list []*template.Template, standard string, images clusterImages) clusterTemplates {
	t := clusterTemplates{byName: map[string]*template.Template{}, standard: standard, images: images}
	for _, one := range list {
		t.byName[one.Name] = one
	}
	return t
}

func (t clusterTemplates) Resolve(ctx context.Context, tenant, name string) (*template.Template, error) {
	found := t.byName[name]
	// Images that need no registry are mapped to the one, and E2B's SDK asks for the other when it is told no name.
	if found == nil && (name == codeInterpreter || name == "base") {
		found = t.byName[t.standard]
	}
	if found == nil && strings.HasPrefix(name, imagePrefix) {
		return t.images.find(ctx, tenant, name)
	}
	if found == nil {
		return nil, fault.New(fault.NotFound, "there is no template %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(t.byName)), ", "))
	}
	return found, nil
}

func (t clusterTemplates) List(tenant string) []template.Info {
	var all []template.Info
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		all = append(all, template.Info{Name: name, Description: t.byName[name].Description, Digest: t.byName[name].Digest, Source: "cluster"})
	}
	return append(all, t.images.list(tenant)...)
}

// ensure has nothing to build: the cluster pulls images, and whoever prepares a template learns whether there is one.
func (t clusterTemplates) ensure(context.Context, string, Progress) error { return nil }

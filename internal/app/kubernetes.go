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
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// openKubernetes connects to the cluster that sandboxes run on.
func openKubernetes(ctx context.Context, cfg config.Config, log *slog.Logger) (parts, error) {
	k := cfg.Kubernetes
	me, err := k.Me()
	if err != nil {
		return parts{}, err
	}
	ranges, err := k.Ranges()
	if err != nil {
		return parts{}, err
	}
	kinds := map[string]kubernetes.Template{}
	for name, t := range k.Templates {
		kinds[name] = kubernetesTemplate(t)
	}
	d, err := kubernetes.New(ctx, kubernetes.Config{
		Kubeconfig: k.Kubeconfig, Namespace: k.Namespace, Image: k.Image, PullPolicy: k.PullPolicy, Owner: me, Templates: kinds,
		StartTimeout: cfg.Sandbox.StartTimeout, RuntimeClass: k.RuntimeClass, Nameservers: k.Nameservers, Policies: k.Policies, Servers: k.Servers, ServerNamespace: k.ServerSpace, ServerRanges: ranges, Log: log,
	})
	if err != nil {
		return parts{}, err
	}
	return parts{
		driver: d, templates: newClusterTemplates(d.Templates(), defaultTemplate(cfg)), close: d.Close, ready: d.Ready,
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

// clusterTemplates are those that the operator describes; nothing of them is built here.
type clusterTemplates struct {
	byName   map[string]*template.Template
	standard string
}

func newClusterTemplates(list []*template.Template, standard string) clusterTemplates {
	t := clusterTemplates{byName: map[string]*template.Template{}, standard: standard}
	for _, one := range list {
		t.byName[one.Name] = one
	}
	return t
}

func (t clusterTemplates) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	found := t.byName[name]
	// Images that need no registry are mapped to the one, and E2B's SDK asks for the other when it is told no name.
	if found == nil && (name == codeInterpreter || name == "base") {
		found = t.byName[t.standard]
	}
	if found == nil {
		return nil, fault.New(fault.NotFound, "there is no template %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(t.byName)), ", "))
	}
	return found, nil
}

func (t clusterTemplates) List(string) []template.Info {
	var all []template.Info
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		all = append(all, template.Info{Name: name, Description: t.byName[name].Description, Digest: t.byName[name].Digest, Source: "cluster"})
	}
	return all
}

// ensure has nothing to build: the cluster pulls images, and whoever prepares a template learns whether there is one.
func (t clusterTemplates) ensure(context.Context, string, Progress) error { return nil }

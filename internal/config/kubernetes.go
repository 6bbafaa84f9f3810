package config

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
)

// Kubernetes says which cluster sandboxes run on, for the driver of that name.
type Kubernetes struct {
	Kubeconfig   string            `toml:"kubeconfig"`  // empty: the cluster that this server runs in, else the user's own
	Namespace    string            `toml:"namespace"`   // of the Pods; empty: the kubeconfig's
	Image        string            `toml:"image"`       // Cove's own: an init container takes the agent from it
	PullPolicy   string            `toml:"pull_policy"` // of that image: Always, IfNotPresent, Never; empty: the cluster's own choice
	Name         string            `toml:"name"`        // this server among others; empty: its host name, which is its Pod's
	RuntimeClass string            `toml:"runtime_class"`
	Nameservers  []string          `toml:"nameservers"`      // of sandboxes, which do not reach the cluster's own; empty: their node's
	Policies     bool              `toml:"network_policies"` // make NetworkPolicies and rely on them
	Servers      map[string]string `toml:"server_labels"`    // labels of the Pods that may connect to sandboxes: this server's own
	ServerSpace  string            `toml:"server_namespace"` // the namespace of those Pods; empty: any
	ServerRanges []string          `toml:"server_ranges"`    // addresses that may, for servers outside the cluster
	Templates    KubernetesKinds   `toml:"templates"`
	Images       KubernetesImages  `toml:"images"`
}

// KubernetesKinds are templates by name. They are written in a file alone: there is no variable for a table of tables.
type KubernetesKinds map[string]KubernetesTemplate

// String names them: what is in each is the file's to tell.
func (k KubernetesKinds) String() string { return fmt.Sprint(slices.Sorted(maps.Keys(k))) }

// KubernetesTemplate is one kind of Pod that sandboxes are made of.
type KubernetesTemplate struct {
	Image         string            `toml:"image"`
	PullPolicy    string            `toml:"pull_policy"`
	PullSecrets   []string          `toml:"pull_secrets"` // names of Secrets in the namespace
	Description   string            `toml:"description"`
	Pool          int               `toml:"pool"` // Pods that wait for a sandbox
	Env           map[string]string `toml:"env"`
	UID           int               `toml:"uid"`     // of a hardened Pod's one user; zero: 1000
	User          string            `toml:"user"`    // of commands in a looser Pod; empty: the uid
	Home          string            `toml:"home"`    // empty: /home/user
	Workdir       string            `toml:"workdir"` // empty: the home
	Python        string            `toml:"python"`  // interpreter of kernels; empty: none
	Preload       []string          `toml:"preload"` // modules that a Pod has imported while it waits
	Warmup        string            `toml:"warmup"`  // code that it runs once after that
	UserSite      string            `toml:"user_site"`
	CPUs          float64           `toml:"cpus"`
	CPURequest    float64           `toml:"cpu_request"` // zero: a tenth of cpus
	Memory        Size              `toml:"memory"`
	MemoryRequest Size              `toml:"memory_request"` // zero: all of memory
	Disk          Size              `toml:"disk"`
	Writable      []string          `toml:"writable"`      // directories beside those that every sandbox may write to
	WritableRoot  bool              `toml:"writable_root"` // the image's own files may be changed
	Looser        bool              `toml:"looser"`        // root inside, sudo, and the capabilities that packages need
	RuntimeClass  string            `toml:"runtime_class"`
	UserNamespace bool              `toml:"user_namespace"` // the Pod's users are nobody on its node (hostUsers: false)
	NodeSelector  map[string]string `toml:"node_selector"`
}

// defaultKubernetes is what a cluster is used like that nobody described.
func defaultKubernetes() Kubernetes {
	return Kubernetes{
		Nameservers: []string{"1.1.1.1", "8.8.8.8"}, Policies: true, Servers: map[string]string{"app.kubernetes.io/name": "cove"},
	}
}

// Me is this server among others.
func (k Kubernetes) Me() (string, error) {
	if k.Name != "" {
		return k.Name, nil
	}
	return os.Hostname()
}

// Ranges are the addresses of servers outside the cluster.
func (k Kubernetes) Ranges() (list []netip.Prefix, err error) {
	for _, text := range k.ServerRanges {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("kubernetes.server_ranges: %q: write it as 192.0.2.0/24", text)
		}
		list = append(list, p)
	}
	return list, nil
}

func validPullPolicy(text string) bool {
	return slices.Contains([]string{"", "Always", "IfNotPresent", "Never"}, text)
}

func (k Kubernetes) validate(used bool) error {
	if !used {
		return nil
	}
	if k.Image == "" {
		return errors.New("kubernetes.image is missing: the image of Cove itself, from which Pods take the agent")
	}
	if len(k.Templates) == 0 {
		return errors.New("there is no [kubernetes.templates.NAME]: describe at least one, with its image")
	}
	if k.Policies && len(k.Servers) == 0 && len(k.ServerRanges) == 0 {
		return errors.New("kubernetes.server_labels and kubernetes.server_ranges are empty: nobody could connect to a sandbox")
	}
	if !validPullPolicy(k.PullPolicy) {
		return fmt.Errorf("kubernetes.pull_policy %q: use Always, IfNotPresent or Never", k.PullPolicy)
	}
	for _, text := range k.Nameservers {
		if _, err := netip.ParseAddr(text); err != nil {
			return fmt.Errorf("kubernetes.nameservers: %q is not an IP address", text)
		}
	}
	for name, t := range k.Templates {
		switch {
		case t.Image == "":
			return fmt.Errorf("kubernetes.templates.%s: image is missing", name)
		case !validPullPolicy(t.PullPolicy):
			return fmt.Errorf("kubernetes.templates.%s: pull_policy %q: use Always, IfNotPresent or Never", name, t.PullPolicy)
		case t.Pool < 0 || t.UID < 0 || t.CPUs < 0 || t.CPURequest < 0:
			return fmt.Errorf("kubernetes.templates.%s: no number can be negative", name)
		}
	}
	if err := k.Images.validate(); err != nil {
		return err
	}
	_, err := k.Ranges()
	return err
}

// KubernetesImages says whether tenants may name images that nodes pull, and what the Pods of such images are besides.
type KubernetesImages struct {
	Enabled       bool              `toml:"enabled"`
	Allow         []string          `toml:"allow"`        // patterns of names in full, like docker.io/library/*; a star is any text without a slash; empty: every image
	Platform      string            `toml:"platform"`     // of the nodes, os/arch; empty: this server's
	PullSecrets   []string          `toml:"pull_secrets"` // names of Secrets in the namespace; a tenant gets no image by them that it may not read itself
	Env           map[string]string `toml:"env"`          // above what an image says
	UID           int               `toml:"uid"`          // of a hardened Pod whose image names no number; zero: 1000
	CPUs          float64           `toml:"cpus"`
	CPURequest    float64           `toml:"cpu_request"`
	Memory        Size              `toml:"memory"`
	MemoryRequest Size              `toml:"memory_request"`
	Disk          Size              `toml:"disk"`
	Writable      []string          `toml:"writable"`
	WritableRoot  bool              `toml:"writable_root"`
	Looser        bool              `toml:"looser"`
	RuntimeClass  string            `toml:"runtime_class"`
	UserNamespace bool              `toml:"user_namespace"`
	NodeSelector  map[string]string `toml:"node_selector"`
}

func (i KubernetesImages) validate() error {
	switch {
	case i.UID < 0 || i.CPUs < 0 || i.CPURequest < 0:
		return errors.New("kubernetes.images: no number can be negative")
	case slices.ContainsFunc(i.Allow, func(pattern string) bool { return !strings.Contains(pattern, "/") }):
		return errors.New("kubernetes.images.allow: a pattern is of an image's name in full, like docker.io/library/*")
	case i.Platform != "" && strings.Count(i.Platform, "/") != 1:
		return fmt.Errorf("kubernetes.images.platform %q: write it as linux/amd64", i.Platform)
	}
	return nil
}

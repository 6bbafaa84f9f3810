package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

var _ sandbox.Puller = (*Driver)(nil)

// imagesName is what the kind is called that Pods of tenants' images are made like. No template has such a name.
const imagesName = "images"

// manifestDigest is all that an image is pulled by: what its server has seen is what runs.
var manifestDigest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ErrImages is said where tenants may name no image.
var ErrImages = fault.New(fault.Unsupported, "sandboxes of this cluster start from its templates; its operator lets them start from images "+
	"with enabled = true in [kubernetes.images], which is sandboxes.images.enabled of the chart")

// AddImage makes the template of an image that nodes will pull. The driver keeps nothing of it.
func (d *Driver) AddImage(_ context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	t, err := template.NewImage(req).Template()
	if err != nil {
		return nil, err
	}
	t.Image.UID, t.Image.GID = -1, -1
	k, err := d.imageKind(t)
	if err != nil {
		return nil, err
	}
	t.Digest, t.Env, t.Workdir, t.Sudo, t.Limits = k.domain.Digest, k.domain.Env, k.domain.Workdir, k.domain.Sudo, k.domain.Limits
	return t, nil
}

// imageKind is what the Pods of an image are: the image's own words, and for the rest the operator's.
func (d *Driver) imageKind(t *template.Template) (*kind, error) {
	if d.images == nil {
		return nil, ErrImages
	}
	if t.Tenant == "" || !manifestDigest.MatchString(t.Image.Digest) {
		return nil, fault.New(fault.Invalid, "the image %.200q has no tenant, or no digest of its manifest", t.Image.Reference)
	}
	own := *d.cfg.Images
	own.Image, own.PullPolicy = pinned(t.Image), string(corev1.PullIfNotPresent)
	own.Env, own.Workdir = map[string]string{}, t.Workdir
	maps.Copy(own.Env, t.Env)
	maps.Copy(own.Env, d.cfg.Images.Env)
	own.NodeSelector = platformNodes(own.NodeSelector, t.Image.Platform)
	own.asUser(t.User)
	own.makeRoom()
	if err := own.addVolumes(t.Image); err != nil {
		return nil, err
	}
	k, err := d.newImageKind(t.Name, own)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "the image cannot be a template here: %s", err)
	}
	return k, nil
}

func (d *Driver) newImageKind(name string, t Template) (*kind, error) {
	k, err := newKind(name, t, d.installation...)
	if err != nil {
		return nil, err
	}
	k.foreign = true
	k.domain.Sudo = false // an image's user is who it says
	if t.Workdir == "" {  // wherever the home of the image's user is
		k.Workdir, k.domain.Workdir = "", ""
	}
	if t.Looser { // root makes what it needs itself
		k.Writable = slices.Compact(slices.Sorted(slices.Values(slices.Concat(scratchDirs, t.Writable))))
		k.Home = ""
	}
	for _, dir := range k.Writable {
		if !slices.Contains(scratchDirs, dir) {
			k.seeds = append(k.seeds, dir)
		}
	}
	return k, nil
}

// scratchDirs are empty at first, whatever the image has there.
var scratchDirs = []string{"/tmp", "/var/tmp"}

// maxVolumes is how many directories an image may want as volumes.
const maxVolumes = 32

// addVolumes makes the directories for which an image wants a place of their own volumes of ours. The node's runtime would make them on its disk
// otherwise, where nothing bounds or counts what is written to them. In the init container that fills ours it does: ours in the same place would hide
// what is to be copied. There they hold what the image has, once more, until that container is removed, and nothing of the tenant's runs that could write.
func (t *Template) addVolumes(i *template.Image) error {
	if len(i.Volumes) > maxVolumes {
		return fault.New(fault.Unsupported, "the image %s wants %d volumes; at most %d are possible", i.Reference, len(i.Volumes), maxVolumes)
	}
	if err := template.CheckVolumes(i); err != nil {
		return err
	}
	all := slices.Clone(t.Writable)
	for _, dir := range i.Volumes {
		clean := path.Clean(dir)
		switch {
		case slices.Contains(ownMounts, clean):
			continue
		case !path.IsAbs(dir) || clean == "/" || strings.Contains(dir, ":") || slices.ContainsFunc(noVolumes, func(of string) bool { return within(of, clean) }):
			return fault.New(fault.Unsupported, "the image %s wants a volume at %.200q, where there can be none", i.Reference, dir)
		}
		all = append(all, clean)
	}
	t.Writable = all
	return nil
}

// ownMounts are volumes that every Pod has, and noVolumes what none may hide.
var (
	ownMounts = []string{"/dev/shm"}
	noVolumes = []string{"/proc", "/sys", "/dev"}
)

// pinned is the name that a node pulls an image by: where it is, and its digest.
func pinned(i *template.Image) string {
	name, _, _ := strings.Cut(i.Reference, "@")
	if slash := strings.LastIndex(name, "/"); strings.LastIndex(name, ":") > slash {
		name = name[:strings.LastIndex(name, ":")]
	}
	return name + "@" + i.Digest
}

// platformNodes selects the nodes that a manifest is for: there is no other choice in it.
func platformNodes(selector map[string]string, platform string) map[string]string {
	all := map[string]string{}
	if os, arch, ok := strings.Cut(platform, "/"); ok {
		all[corev1.LabelOSStable], all[corev1.LabelArchStable] = os, arch
	}
	maps.Copy(all, selector)
	return all
}

// asUser has an image's user be the Pod's. A hardened Pod is one user's, whose number has to be known before the image is there: a name, or root, is
// the usual user.
func (t *Template) asUser(user string) {
	if t.Looser {
		t.User = user
		return
	}
	name, group, _ := strings.Cut(user, ":")
	if uid, err := strconv.ParseUint(name, 10, 31); err == nil && uid != 0 {
		t.UID, t.GID = int(uid), nil
		if gid, err := strconv.ParseUint(group, 10, 31); err == nil {
			t.GID = ptr(int(gid))
		}
	}
}

// makeRoom lets the user of a hardened Pod write where the image's commands begin, and gives one a place to begin whose image names none.
func (t *Template) makeRoom() {
	switch {
	case t.Looser:
	case t.Workdir == "/" || t.Workdir == "": // which is what the template of such an image says
		t.Workdir = "" // the home
	case mayBeVolume(t.Workdir) && !slices.ContainsFunc(writableDirs, func(dir string) bool { return within(dir, t.Workdir) }) && !within(homeVolume(defaultHome), t.Workdir):
		t.Writable = append(slices.Clone(t.Writable), t.Workdir)
	}
}

// systemDirs are those whose programs, or more, a volume would hide.
var systemDirs = []string{"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys"}

// mayBeVolume reports whether a directory is an application's own.
func mayBeVolume(dir string) bool {
	if len(dir) > template.MaxVolumePath || strings.Contains(dir, ":") { // which no volume's place may have
		return false
	}
	if slices.ContainsFunc(systemDirs, func(system string) bool { return within(system, dir) }) {
		return false
	}
	return !slices.Contains([]string{"/", "/opt", "/usr", "/var"}, dir) && !slices.Contains([]string{"/usr", "/usr/local", "/var"}, path.Dir(dir))
}

func within(dir, name string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }

// seeder puts into the volumes what the image has in their place. It is our program in the tenant's image, with the rights of the sandbox's agent.
func (d *Driver) seeder(k *kind, r podRequest) corev1.Container {
	to := k.programDir(r.name) + "-seed" // where each volume is under its later place
	c := corev1.Container{
		Name: seedName, Image: k.Image, ImagePullPolicy: corev1.PullPolicy(k.PullPolicy), WorkingDir: "/",
		Command:                  []string{k.program(r.name), "seed", to, strconv.FormatInt(r.limits.DiskBytes, 10)},
		VolumeMounts:             []corev1.VolumeMount{{Name: volumeCove, MountPath: k.programDir(r.name), ReadOnly: true}},
		Resources:                resources(k, r.limits),
		SecurityContext:          containerSecurity(k),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
	}
	c.SecurityContext.ReadOnlyRootFilesystem = ptr(true)
	for i, dir := range k.Writable {
		if slices.Contains(k.seeds, dir) {
			c.Command = append(c.Command, literal(dir))
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: fmt.Sprintf("dir-%d", i), MountPath: to + dir})
		}
	}
	return c
}

// pullFailures are the reasons by which a node says that it cannot have an image.
var pullFailures = []string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"}

// foreignImage is the image that a tenant has named, if that is what a container is of.
func foreignImage(pod *corev1.Pod, container string) string {
	if container == installName {
		return ""
	}
	return pod.Annotations[annotationImage]
}

// unpulled says that a node cannot have an image. Whoever names images of its own is not told the node's words: they would tell it what the node's
// network is like. Neither would it be told a kind of failure where it may name any registry, and so any address.
func (d *Driver) unpulled(pod *corev1.Pod, s corev1.ContainerStatus) error {
	w := s.State.Waiting
	image := foreignImage(pod, s.Name)
	if image == "" {
		return fault.New(fault.Unavailable, "the image %s cannot be had: %s: %s", s.Image, w.Reason, w.Message)
	}
	trouble := pullFailed
	if d.cfg.PullKinds {
		trouble = pullTrouble(image, w.Message)
	}
	return fault.Wrap(fault.Unavailable, nodesWords(w.Reason, w.Message), "the cluster's nodes cannot pull %s: %s", image, trouble)
}

// nodesWords are for the log; whoever named the image does not see them.
func nodesWords(reason, message string) error {
	return fmt.Errorf("the node says %s: %s", reason, message)
}

const pullFailed = "they do not reach its registry, or what came was not the image; the operator finds the node's words in the server's log"

// othersWords are parts of a node's message that a tenant or a registry has chosen.
var othersWords = regexp.MustCompile(`https?://[^\s"]+|(sha256:)?[0-9a-f]{64}`)

func pullTrouble(image, message string) string {
	message = strings.ToLower(message)
	name, _, _ := strings.Cut(strings.ToLower(image), "@")
	message = othersWords.ReplaceAllString(strings.ReplaceAll(message, name, ""), "")
	for _, known := range []struct{ words, means string }{
		{"toomanyrequests|429 too many requests", "its registry limits how often it is asked; try again later"},
		{"401 unauthorized|403 forbidden|authorization failed|pull access denied|insufficient_scope|no basic auth credentials", "its registry does not give it to them; the operator can name Secrets with credentials (pull_secrets)"},
		{"404 not found|manifest unknown|: not found", "its registry says that it does not have it"},
		{"no space left on device", "a node's disk is full"},
	} {
		for word := range strings.SplitSeq(known.words, "|") {
			if strings.Contains(message, word) {
				return known.means
			}
		}
	}
	return pullFailed
}

// unstarted says that a node cannot start a container; of a tenant's image in few words, as unpulled does.
func unstarted(pod *corev1.Pod, container, reason, message string) error {
	image := foreignImage(pod, container)
	if image == "" {
		return fault.New(fault.Unavailable, "its container cannot be started: %s: %s", reason, message)
	}
	return fault.Wrap(fault.Unavailable, nodesWords(reason, message), "the cluster's nodes cannot start %s: %s", image, startFailed)
}

const startFailed = "where it has links or files in the place of directories, that may be why; the operator finds the node's words in the server's log"

// nodeFailures are the reasons by which a container ends that never ran: what is said then is the node's.
var nodeFailures = []string{"StartError", "ContainerCannotRun"}

// How many images a tenant has nodes pull at a time, as far as one server knows, and how many starts there are with those that wait for it. Nodes
// pull few at once, and everybody's; and whoever waits here holds up other starts.
const (
	maxPulling = 4
	maxWaiting = 16
)

// pulls are the starts of each tenant's that wait for a node to have their image.
type pulls struct {
	mu sync.Mutex
	of map[string]*turn
}

type turn struct {
	slots chan struct{}
	users int // that have a slot or wait for one
}

// enter waits until a tenant may have another image pulled. Whoever has entered may leave more than once.
func (p *pulls) enter(ctx context.Context, tenant string) (leave func(), err error) {
	p.mu.Lock()
	t := p.of[tenant]
	if t == nil {
		t = &turn{slots: make(chan struct{}, maxPulling)}
		p.of[tenant] = t
	}
	if t.users >= maxWaiting {
		p.mu.Unlock()
		return nil, fault.New(fault.Exhausted, "%d sandboxes of yours wait for their images already; try again when they have started", maxWaiting)
	}
	t.users++
	p.mu.Unlock()
	gone := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(p.of, tenant)
		}
	}
	select {
	case t.slots <- struct{}{}:
		return sync.OnceFunc(func() { <-t.slots; gone() }), nil
	case <-ctx.Done():
		gone()
		return nil, fault.Wrap(fault.Exhausted, context.Cause(ctx), "%d sandboxes of yours wait for their images already; try again when they have started", maxPulling)
	}
}

// isPulled reports whether a node has the tenant's image of a Pod.
func isPulled(pod *corev1.Pod) bool {
	return slices.ContainsFunc(allStatuses(pod), func(s corev1.ContainerStatus) bool {
		return s.Name != installName && (s.State.Running != nil || s.State.Terminated != nil)
	})
}

package kubernetes

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

const (
	containerName = "sandbox"
	installName   = "install"
	seedName      = "seed"
	volumeCove    = "cove"
	volumeShm     = "shm"
	// installDir is where the init container has the volume. Its image has nothing of that name.
	installDir = "/install"
	// imageProgram is the program in Cove's own image.
	imageProgram = "/cove-pod"
	// shmSize is what /dev/shm holds, counted as the sandbox's memory.
	shmSize = 64 << 20
)

// rootCapabilities are what root in a looser Pod has: enough for packages to be installed and for users to be changed.
var rootCapabilities = []corev1.Capability{
	"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETFCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE",
}

// podRequest is what differs between Pods of one template.
type podRequest struct {
	name   string
	labels map[string]string
	notes  map[string]string
	limits template.Limits
	memory bool // writable directories are in memory
}

// pod is the whole object. Nothing of a tenant's is in its spec, but the image that it names.
func (d *Driver) pod(k *kind, r podRequest) (*corev1.Pod, error) {
	settings, err := podapi.EncodeSettings(podapi.Settings{
		Name: r.name, Token: d.agents.Authority().Token(r.name), Authority: d.agents.Authority().Certificate,
		Python: k.Python, Preload: k.Preload, Warmup: k.Warmup, UserSite: k.UserSite, User: k.User, Home: k.Home, Workdir: k.Workdir, Foreign: k.foreign,
		Dir: k.programDir(r.name),
	})
	if err != nil {
		return nil, err
	}
	labels := map[string]string{labelManaged: managedBy, labelTemplate: k.name, labelDigest: k.digest, labelNetwork: networkNone}
	for key, value := range r.labels {
		labels[key] = value
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: r.name, Namespace: d.cfg.Namespace, Labels: labels, Annotations: r.notes},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever, // a sandbox that was restarted would be another one
			AutomountServiceAccountToken:  ptr(false),
			EnableServiceLinks:            ptr(false),
			TerminationGracePeriodSeconds: ptr(int64(1)),
			HostUsers:                     k.HostUsers,
			NodeSelector:                  k.NodeSelector,
			SecurityContext:               podSecurity(k),
			Volumes:                       volumes(k, r),
			InitContainers:                []corev1.Container{d.installer(k)},
			Containers:                    []corev1.Container{d.container(k, r, settings)},
		},
	}
	if k.foreign {
		pod.Annotations = with(pod.Annotations, annotationImage, k.Image)
	}
	if len(k.seeds) > 0 {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, d.seeder(k, r))
	}
	d.resolver(&pod.Spec)
	if class := orElse(k.RuntimeClass, d.cfg.RuntimeClass); class != "" {
		pod.Spec.RuntimeClassName = &class
	}
	for _, name := range k.PullSecrets {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
	}
	if size := pod.Size(); k.foreign && size > maxPod {
		return nil, fault.New(fault.Unsupported, "the Pod of %.200s would be an object of %d KiB, at most %d are possible: its volumes and working directory have names that are too long",
			k.Image, size>>10, maxPod>>10)
	}
	return pod, nil
}

// maxPod is how large an object may be that an image has words in: the cluster keeps it, and every server and the node read it again and again.
const maxPod = 64 << 10

// programDir is where a Pod has our program and what belongs to it. A runtime follows links of the image when it mounts, and mounts what has the
// longer path later: whoever makes an image can cover any directory whose name he knows, and put a program of his own in the place of ours. The name of a
// Pod is not known before there is one.
func (k *kind) programDir(pod string) string {
	if k.foreign {
		return "/run/" + pod
	}
	return podapi.Dir
}

func (k *kind) program(pod string) string { return path.Join(k.programDir(pod), podapi.ProgramName) }

// literal keeps Kubernetes from reading $(NAME) in a text.
func literal(text string) string { return strings.ReplaceAll(text, "$", "$$") }

func ptr[T any](v T) *T { return &v }

func with(all map[string]string, key, value string) map[string]string {
	all = maps.Clone(all)
	if all == nil {
		all = map[string]string{}
	}
	all[key] = value
	return all
}

func orElse(value, other string) string {
	if value != "" {
		return value
	}
	return other
}

// resolver keeps sandboxes off the cluster's DNS, which would tell them its services and is at an address that they may not reach.
func (d *Driver) resolver(spec *corev1.PodSpec) {
	spec.DNSPolicy = corev1.DNSDefault
	if len(d.cfg.Nameservers) > 0 {
		spec.DNSPolicy, spec.DNSConfig = corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: d.cfg.Nameservers}
	}
}

func podSecurity(k *kind) *corev1.PodSecurityContext {
	s := &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	if !k.Looser {
		id, group := int64(k.UID), int64(*k.GID)
		// No fsGroup: everybody in the Pod may write to its volumes anyway, and a group of theirs would be passed on to every file.
		s.RunAsNonRoot, s.RunAsUser, s.RunAsGroup = ptr(true), &id, &group
	}
	return s
}

func containerSecurity(k *kind) *corev1.SecurityContext {
	s := &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr(false), Privileged: ptr(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		ReadOnlyRootFilesystem: ptr(!k.Looser && !k.WritableRoot),
	}
	if k.Looser {
		// sudo asks the program, which is root, so that nothing needs a set-user-id bit.
		s.RunAsUser, s.RunAsNonRoot, s.Capabilities.Add = ptr(int64(0)), ptr(false), slices.Clone(rootCapabilities)
	}
	return s
}

func volumes(k *kind, r podRequest) []corev1.Volume {
	empty := func(name string, size int64, medium corev1.StorageMedium) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{
			Medium: medium, SizeLimit: resource.NewQuantity(size, resource.BinarySI),
		}}}
	}
	list := []corev1.Volume{empty(volumeCove, 64<<20, ""), empty(volumeShm, min(shmSize, r.limits.MemoryBytes), corev1.StorageMediumMemory)}
	medium := corev1.StorageMediumDefault
	if r.memory {
		medium = corev1.StorageMediumMemory
	}
	for i := range k.Writable {
		list = append(list, empty(fmt.Sprintf("dir-%d", i), r.limits.DiskBytes, medium))
	}
	return list
}

func mounts(k *kind, pod string) []corev1.VolumeMount {
	list := []corev1.VolumeMount{{Name: volumeCove, MountPath: k.programDir(pod), ReadOnly: true}, {Name: volumeShm, MountPath: "/dev/shm"}}
	for i, dir := range k.Writable {
		list = append(list, corev1.VolumeMount{Name: fmt.Sprintf("dir-%d", i), MountPath: dir})
	}
	return list
}

// installer brings our program and the kernel's files, so that any image will do.
func (d *Driver) installer(k *kind) corev1.Container {
	// No more than the sandbox itself asks for: a Pod's room is what its largest part asks for.
	small := resourceList(min(k.CPURequest, 0.05), min(k.MemRequest, 32<<20), 0)
	security := containerSecurity(k)
	security.ReadOnlyRootFilesystem, security.Capabilities.Add = ptr(true), nil
	return corev1.Container{
		Name: installName, Image: d.cfg.Image, ImagePullPolicy: corev1.PullPolicy(d.cfg.PullPolicy), Command: []string{imageProgram, "install", installDir},
		VolumeMounts:    []corev1.VolumeMount{{Name: volumeCove, MountPath: installDir}},
		Resources:       corev1.ResourceRequirements{Requests: small, Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")}},
		SecurityContext: security,
	}
}

func (d *Driver) container(k *kind, r podRequest, settings string) corev1.Container {
	here := corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: portNumber}}
	return corev1.Container{
		Name: containerName, Image: k.Image, ImagePullPolicy: corev1.PullPolicy(k.PullPolicy), Command: []string{k.program(r.name), "serve"},
		WorkingDir: "/", Env: []corev1.EnvVar{{Name: podapi.Variable, Value: literal(settings)}},
		Ports:        []corev1.ContainerPort{{Name: "agent", ContainerPort: podapi.Port}},
		VolumeMounts: mounts(k, r.name), Resources: resources(k, r.limits), SecurityContext: containerSecurity(k),
		// It listens once it is warm. From then on the port stays open for as long as the container lives.
		StartupProbe:   &corev1.Probe{ProbeHandler: here, PeriodSeconds: 1, FailureThreshold: 600},
		ReadinessProbe: &corev1.Probe{ProbeHandler: here, PeriodSeconds: 60, TimeoutSeconds: 5},
	}
}

func resources(k *kind, l template.Limits) corev1.ResourceRequirements {
	part := func(request, limit, of float64) float64 { return request * limit / of }
	return corev1.ResourceRequirements{
		Requests: resourceList(part(k.CPURequest, l.CPUs, k.CPUs), int64(part(float64(k.MemRequest), float64(l.MemoryBytes), float64(k.Memory))), 0),
		Limits:   resourceList(l.CPUs, l.MemoryBytes, l.DiskBytes),
	}
}

// resourceList writes amounts; ephemeral storage is what the container, its log and its emptyDirs have on the node's disk.
func resourceList(cpus float64, memory, disk int64) corev1.ResourceList {
	list := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(max(1, int64(cpus*1000)), resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(memory, resource.BinarySI),
	}
	if disk > 0 {
		list[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(disk, resource.BinarySI)
	} else {
		list[corev1.ResourceEphemeralStorage] = resource.MustParse("64Mi")
	}
	return list
}

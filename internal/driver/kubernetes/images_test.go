package kubernetes_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	domain "github.com/covehq/cove/internal/template"
)

const manifest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// anImage is one that a node could pull, if there were one.
var anImage = domain.Image{Reference: "registry.test:5000/team/app:1", Digest: manifest, Platform: "linux/arm64"}

// imagesDriver is one whose tenants may name images.
func imagesDriver(t *testing.T, a *api, images *kubernetes.Template) *kubernetes.Driver {
	t.Helper()
	d, err := kubernetes.New(t.Context(), kubernetes.Config{
		Namespace: "boxes", Image: "cove", Owner: "server-1", Templates: map[string]kubernetes.Template{"python": {Image: "host"}}, Images: images, Rest: a.config(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func imageRequest(change func(*sandbox.ImageRequest)) sandbox.ImageRequest {
	r := sandbox.ImageRequest{Tenant: "acme", Name: "img-" + strings.Repeat("0", 32), Image: anImage, Env: map[string]string{"COLOUR": "blue", "KEPT": "image"}}
	if change != nil {
		change(&r)
	}
	return r
}

func imagePod(t *testing.T, images kubernetes.Template, change func(*sandbox.ImageRequest)) (*domain.Template, *corev1.Pod) {
	t.Helper()
	d := imagesDriver(t, newAPI(t), &images)
	made, err := d.AddImage(t.Context(), imageRequest(change))
	if err != nil {
		t.Fatal(err)
	}
	pod, err := d.PodOf(made)
	if err != nil {
		t.Fatal(err)
	}
	return made, pod
}

func mountsOf(c corev1.Container) (all []string) {
	for _, m := range c.VolumeMounts {
		all = append(all, m.MountPath)
	}
	return all
}

func TestAnImagesPodIsPinnedAndHardened(t *testing.T) {
	t.Parallel()
	made, pod := imagePod(t, kubernetes.Template{PullSecrets: []string{"ours"}, Env: map[string]string{"KEPT": "operator"}, NodeSelector: map[string]string{"pool": "boxes"}}, func(r *sandbox.ImageRequest) {
		r.Workdir, r.User = "/srv/app", "app"
	})
	main, seed := pod.Spec.Containers[0], pod.Spec.InitContainers[1]
	for _, c := range []corev1.Container{main, seed} {
		if c.Image != "registry.test:5000/team/app@"+manifest || c.ImagePullPolicy != corev1.PullIfNotPresent {
			t.Errorf("%s: %s %s", c.Name, c.Image, c.ImagePullPolicy)
		}
		is(t, c.Name+" readOnlyRootFilesystem", c.SecurityContext.ReadOnlyRootFilesystem, true)
		is(t, c.Name+" allowPrivilegeEscalation", c.SecurityContext.AllowPrivilegeEscalation, false)
		if len(c.SecurityContext.Capabilities.Add) > 0 {
			t.Errorf("%s: %+v", c.Name, c.SecurityContext.Capabilities)
		}
	}
	is(t, "runAsNonRoot", pod.Spec.SecurityContext.RunAsNonRoot, true)
	is(t, "runAsUser", pod.Spec.SecurityContext.RunAsUser, int64(1000))
	if len(seed.Env) > 0 || !slices.Equal(seed.Command[:2], []string{"/run/cove/cove-pod", "seed"}) {
		t.Errorf("%v %v", seed.Env, seed.Command)
	}
	for _, dir := range []string{"/app", "/home", "/srv/app", "/workspace"} {
		if !slices.Contains(mountsOf(main), dir) || !slices.Contains(mountsOf(seed), "/run/cove-seed"+dir) || !slices.Contains(seed.Command, dir) {
			t.Errorf("%s: %v %v", dir, mountsOf(main), mountsOf(seed))
		}
	}
	if want := map[string]string{"pool": "boxes", "kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64"}; !equalMaps(pod.Spec.NodeSelector, want) {
		t.Errorf("%v", pod.Spec.NodeSelector)
	}
	if len(pod.Spec.ImagePullSecrets) != 1 || pod.Annotations["cove.dev/image"] != main.Image {
		t.Errorf("%+v %v", pod.Spec.ImagePullSecrets, pod.Annotations)
	}
	if made.Workdir != "/srv/app" || made.Env["COLOUR"] != "blue" || made.Env["KEPT"] != "operator" || made.Env["PATH"] == "" || made.Limits.MemoryBytes == 0 {
		t.Errorf("%+v", made)
	}
}

func equalMaps(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k := range a {
		if a[k] != b[k] {
			return false
		}
	}
	return true
}

func TestAnImagesUserIsThePodsWhereItHasANumber(t *testing.T) {
	t.Parallel()
	for user, want := range map[string][2]int64{"": {1500, 1500}, "root": {1500, 1500}, "0:0": {1500, 1500}, "app:staff": {1500, 1500}, "1001": {1001, 1001}, "1001:7": {1001, 7}} {
		_, pod := imagePod(t, kubernetes.Template{UID: 1500}, func(r *sandbox.ImageRequest) { r.User = user })
		is(t, user, pod.Spec.SecurityContext.RunAsUser, want[0])
		is(t, user, pod.Spec.SecurityContext.RunAsGroup, want[1])
	}
	made, pod := imagePod(t, kubernetes.Template{Looser: true}, func(r *sandbox.ImageRequest) { r.User = "app:staff" })
	main := pod.Spec.Containers[0]
	is(t, "looser", main.SecurityContext.RunAsUser, int64(0))
	if !strings.Contains(main.Env[0].Value, `"user":"app:staff"`) {
		t.Errorf("%s", main.Env[0].Value)
	}
	if made.Sudo {
		t.Error("an image's user has sudo")
	}
	if len(pod.Spec.InitContainers) != 1 || slices.Contains(mountsOf(main), "/app") {
		t.Errorf("a looser Pod hides what its image has: %v", mountsOf(main))
	}
}

func TestWhereAnImageBeginsCanBeWritten(t *testing.T) {
	t.Parallel()
	d := imagesDriver(t, newAPI(t), &kubernetes.Template{})
	for dir, writable := range map[string]bool{
		"/code": true, "/usr/src/app": true, "/var/www/html": true, "/opt/thing": true, "/root": true, "/": false, "/usr": false, "/usr/local": false, "/usr/local/bin": false,
		"/etc/x": false, "/run/cove/kernel": false, "/proc/1": false, "/var/lib": false, "/app/src": false, "/home/app": false,
	} {
		made, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Workdir = dir }))
		if err != nil {
			t.Fatal(err)
		}
		pod, err := d.PodOf(made)
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Contains(mountsOf(pod.Spec.Containers[0]), dir); got != writable {
			t.Errorf("%s: %v", dir, mountsOf(pod.Spec.Containers[0]))
		}
		if dir == "/" && made.Workdir != "" {
			t.Errorf("%q", made.Workdir)
		}
	}
}

func TestVolumesThatAnImageWantsAreOurs(t *testing.T) {
	t.Parallel()
	for _, like := range []kubernetes.Template{{}, {Looser: true}} {
		_, pod := imagePod(t, like, func(r *sandbox.ImageRequest) {
			r.Image.Volumes = []string{"/var/lib/data", "/data/", "/dev/shm", "/tmp"}
		})
		main, seed := pod.Spec.Containers[0], pod.Spec.InitContainers[1]
		for _, dir := range []string{"/var/lib/data", "/data"} {
			if !slices.Contains(mountsOf(main), dir) || !slices.Contains(mountsOf(seed), "/run/cove-seed"+dir) {
				t.Errorf("%s: %v %v", dir, mountsOf(main), mountsOf(seed))
			}
		}
		all := mountsOf(main)
		if slices.Sort(all); len(slices.Compact(slices.Clone(all))) != len(all) {
			t.Errorf("twice: %v", all)
		}
	}
	d := imagesDriver(t, newAPI(t), &kubernetes.Template{})
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("/v%d", i)
	}
	for _, volumes := range [][]string{{"/"}, {"data"}, {"/proc/self"}, {"/dev"}, {"/run/cove/kernel"}, {"/a/../proc"}, many} {
		_, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Image.Volumes = volumes }))
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "volume") {
			t.Errorf("%v: %v", volumes, err)
		}
	}
}

func TestImagesAreOffUntilTheOperatorWantsThem(t *testing.T) {
	t.Parallel()
	d := imagesDriver(t, newAPI(t), nil)
	if d.Caps().Pulls {
		t.Errorf("%+v", d.Caps())
	}
	_, err := d.AddImage(t.Context(), imageRequest(nil))
	if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "[kubernetes.images]") {
		t.Errorf("%v", err)
	}
	image := anImage
	err = d.Start(t.Context(), sandbox.StartRequest{ID: "sb-1", Tenant: "acme", Template: &domain.Template{Name: "img-1", Tenant: "acme", Image: &image}})
	if !fault.Is(err, fault.Unsupported) {
		t.Errorf("%v", err)
	}
}

func TestAnImageThatNodesCannotPullLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ message, want string }{
		"gone":        {`failed to pull and unpack image: failed to resolve reference: registry.test:5000/team/app@` + manifest + `: not found`, "does not have it"},
		"private":     {"pull access denied, repository does not exist or may require authorization: server message: insufficient_scope", "pull_secrets"},
		"unreachable": {"dial tcp 10.1.2.3:5000: connect: connection refused", "do not reach"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t)
			d := imagesDriver(t, a, &kubernetes.Template{})
			made, err := d.AddImage(t.Context(), imageRequest(nil))
			if err != nil {
				t.Fatal(err)
			}
			failed := make(chan error, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			go func() {
				failed <- d.Start(ctx, sandbox.StartRequest{ID: "sb-1", Tenant: "acme", Template: made, Network: policy.Network{Mode: policy.None}})
			}()
			eventually(t, "a Pod", func() bool { return a.pods("claimed") == 1 })
			a.mu.Lock()
			var pod string
			for key := range a.objects {
				if rest, ok := strings.CutPrefix(key, "pods/"); ok {
					pod = rest
				}
			}
			a.mu.Unlock()
			a.change(pod, func(o object) string {
				o["status"] = object{"phase": "Pending", "initContainerStatuses": []any{object{"name": "seed", "state": object{"waiting": object{"reason": "ErrImagePull", "message": c.message}}}}}
				return "MODIFIED"
			})
			err = <-failed
			if said := fault.Message(err); !fault.Is(err, fault.Unavailable) || !strings.Contains(said, c.want) || strings.Contains(said, "10.1.2.3") || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%v", err)
			}
			eventually(t, "no Pod", func() bool { return a.count("DELETE pods") == 1 })
			if list, err := d.List(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("%+v %v", list, err)
			}
		})
	}
}

func TestAnImagesOwnPythonRunsCells(t *testing.T) {
	t.Parallel()
	python(t)
	a := newAPI(t)
	newKubelet(t, a)
	d := imagesDriver(t, a, &kubernetes.Template{UID: containerUID})
	run := func(id string, env map[string]string) error {
		made, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Env = env }))
		if err != nil {
			t.Fatal(err)
		}
		start(t, d, sandbox.StartRequest{ID: id, Tenant: "acme", Template: made, Network: policy.Network{Mode: policy.None}})
		if err := d.Kernel(t.Context(), id, "default"); !fault.Is(err, fault.Unsupported) {
			t.Errorf("%v", err)
		}
		_, err = agent(d, id).KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "default"})
		return err
	}
	if err := run("sb-1", nil); err != nil {
		t.Fatal(err)
	}
	k, err := agent(d, "sb-1").KernelWait(t.Context(), agentapi.KernelParams{Kernel: "default"})
	if err != nil || k.State == agentapi.KernelDead {
		t.Errorf("%+v %v", k, err)
	}
	if err := run("sb-2", map[string]string{"PATH": "/nowhere"}); !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "python3") {
		t.Errorf("%v", err)
	}
}

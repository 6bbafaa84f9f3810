package kubernetes_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
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
	return openImagesDriver(t, kubernetes.Config{Images: images, PullKinds: true, Rest: a.config()})
}

func openImagesDriver(t *testing.T, cfg kubernetes.Config) *kubernetes.Driver {
	t.Helper()
	cfg.Namespace, cfg.Image, cfg.Owner, cfg.Templates = "boxes", "cove", "server-1", map[string]kubernetes.Template{"python": {Image: "host"}}
	d, err := kubernetes.New(t.Context(), cfg)
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
	if len(seed.Env) > 0 || !slices.Equal(seed.Command[1:4], []string{"seed", "/run/" + pod.Name + "-seed", "2147483648"}) {
		t.Errorf("%v %v", seed.Env, seed.Command)
	}
	for _, dir := range []string{"/app", "/home", "/srv/app", "/workspace"} {
		if !slices.Contains(mountsOf(main), dir) || !slices.Contains(mountsOf(seed), "/run/"+pod.Name+"-seed"+dir) || !slices.Contains(seed.Command, dir) {
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
	for user, want := range map[string][2]int64{"": {1500, 1500}, "root": {1500, 1500}, "0:0": {1500, 1500}, "app:staff": {1500, 1500}, "1001": {1001, 1001}, "1001:7": {1001, 7}, "1001:0": {1001, 0}} {
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
		"/code:1": false, "/" + strings.Repeat("x", 600): false,
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
			if !slices.Contains(mountsOf(main), dir) || !slices.Contains(mountsOf(seed), "/run/"+pod.Name+"-seed"+dir) {
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
	for _, volumes := range [][]string{{"/"}, {"data"}, {"/proc/self"}, {"/dev"}, {"/a:b"}, {"/a/../proc"}, many} {
		_, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Image.Volumes = volumes }))
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "volume") {
			t.Errorf("%v: %v", volumes, err)
		}
	}
}

// A runtime follows the image's links when it mounts, and mounts long paths last: what an image can name it can cover.
func TestOurProgramIsWhereNoImageCanCoverIt(t *testing.T) {
	t.Parallel()
	for _, like := range []kubernetes.Template{{}, {Looser: true}} {
		_, pod := imagePod(t, like, func(r *sandbox.ImageRequest) { r.Image.Volumes = []string{"/x/y/z", "/run", "/run/cove"} })
		if parts := strings.Split(pod.Name, "-"); len(parts[len(parts)-1]) != 16 { // of 32 letters
			t.Errorf("%s has not enough that nobody can guess", pod.Name)
		}
		dir := "/run/" + pod.Name
		for _, c := range []corev1.Container{pod.Spec.Containers[0], pod.Spec.InitContainers[1]} {
			if c.Command[0] != dir+"/cove-pod" {
				t.Errorf("%s: %v", c.Name, c.Command)
			}
			for _, m := range c.VolumeMounts {
				if (m.Name == "cove") != (m.MountPath == dir) || m.Name == "cove" && !m.ReadOnly {
					t.Errorf("%s: %+v", c.Name, m)
				}
			}
		}
		if settings := pod.Spec.Containers[0].Env[0].Value; !strings.Contains(settings, `"dir":"`+dir+`"`) {
			t.Errorf("its files are elsewhere: %s", settings)
		}
	}
}

func TestAnImagesWordsAreNotKubernetes(t *testing.T) {
	t.Parallel()
	_, pod := imagePod(t, kubernetes.Template{}, func(r *sandbox.ImageRequest) {
		r.Image.Volumes, r.Workdir = []string{"/a/$(COVE_POD)/$$"}, "/srv/$(HOSTNAME)"
	})
	main, seed := pod.Spec.Containers[0], pod.Spec.InitContainers[1]
	if !slices.Contains(seed.Command, "/a/$$(COVE_POD)/$$$$") || !slices.Contains(mountsOf(main), "/a/$(COVE_POD)/$$") {
		t.Errorf("%v %v", seed.Command, mountsOf(main))
	}
	if !strings.Contains(main.Env[0].Value, `"workdir":"/srv/$$(HOSTNAME)"`) {
		t.Errorf("%s", main.Env[0].Value)
	}
}

func TestAnImageMakesNoLargePod(t *testing.T) {
	t.Parallel()
	d := imagesDriver(t, newAPI(t), &kubernetes.Template{})
	for _, volumes := range [][]string{{"/" + strings.Repeat("x", 512)}, slices.Collect(func(yield func(string) bool) {
		for n := range 29 {
			if !yield(fmt.Sprintf("/%d%s", n, strings.Repeat("x", 300))) {
				return
			}
		}
	})} {
		_, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Image.Volumes = volumes }))
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "too long") {
			t.Errorf("%d of %d bytes: %v", len(volumes), len(volumes[0]), err)
		}
	}
	// Whatever else an image's words come into.
	large := imagesDriver(t, newAPI(t), &kubernetes.Template{Writable: []string{"/" + strings.Repeat("x", 30_000)}})
	made, err := large.AddImage(t.Context(), imageRequest(nil))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := large.PodOf(made); !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "64") {
		t.Errorf("%v", err)
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

// startFailing starts a sandbox of an image whose Pod gets a status, and is how the start ends.
func startFailing(t *testing.T, cfg kubernetes.Config, status object) error {
	t.Helper()
	a := newAPI(t)
	cfg.Images, cfg.Rest = &kubernetes.Template{}, a.config()
	d := openImagesDriver(t, cfg)
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
	a.change(a.podNames()[0], func(o object) string {
		o["status"] = status
		return "MODIFIED"
	})
	err = <-failed
	eventually(t, "no Pod", func() bool { return a.count("DELETE pods") == 1 })
	if list, err := d.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%+v %v", list, err)
	}
	return err
}

// podNames are those of all Pods.
func (a *api) podNames() (names []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key := range a.objects {
		if name, ok := strings.CutPrefix(key, "pods/"); ok {
			names = append(names, name)
		}
	}
	return names
}

func waiting(reason, message string) object {
	return object{"phase": "Pending", "initContainerStatuses": []any{object{"name": "seed", "state": object{"waiting": object{"reason": reason, "message": message}}}}}
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
			err := startFailing(t, kubernetes.Config{PullKinds: true}, waiting("ErrImagePull", c.message))
			if said := fault.Message(err); !fault.Is(err, fault.Unavailable) || !strings.Contains(said, c.want) || strings.Contains(said, "10.1.2.3") || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%v", err)
			}
			// Whoever may name any registry would ask the node for any address.
			err = startFailing(t, kubernetes.Config{}, waiting("ErrImagePull", c.message))
			if said := fault.Message(err); !strings.Contains(said, "do not reach its registry, or") || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestKindsOfFailureAreNotReadFromNames(t *testing.T) {
	t.Parallel()
	hex := strings.Repeat("429401403404", 6)[:64]
	image := "registry.test/forbidden/404-not-found@sha256:" + hex
	for message, want := range map[string]string{
		`failed to pull "` + image + `": dial tcp: i/o timeout`:                                                         "do not reach",
		`Head "https://registry.test/v2/forbidden/404%20not%20found: not found": connection refused`:                    "do not reach",
		`layer sha256:` + hex + `: unexpected EOF after 401 of 403 bytes`:                                               "do not reach",
		`failed to copy: httpReadSeeker: failed open: unexpected status code https://x.test/v2/: 429 Too Many Requests`: "limits how often",
		`unexpected status from HEAD request to https://x.test/v2/a: 403 Forbidden`:                                     "pull_secrets",
		`failed to resolve reference "` + image + `": ` + image + `: not found`:                                         "does not have it",
		`write /var/lib/x: no space left on device`:                                                                     "disk is full",
	} {
		if got := kubernetes.PullTrouble(image, message); !strings.Contains(got, want) {
			t.Errorf("%s: %s", message, got)
		}
	}
}

func TestWhyANodeCannotStartAnImageIsTheOperatorsToKnow(t *testing.T) {
	t.Parallel()
	const words = `failed to create containerd task: mount "/var/lib/kubelet/pods/1": not a directory`
	ended := object{"phase": "Failed", "initContainerStatuses": []any{object{"name": "seed", "state": object{"terminated": object{
		"exitCode": 128, "reason": "StartError", "message": words,
	}}}}}
	for _, status := range []object{waiting("CreateContainerError", words), waiting("RunContainerError", words), waiting("CreateContainerConfigError", words), ended} {
		err := startFailing(t, kubernetes.Config{PullKinds: true}, status)
		if said := fault.Message(err); !fault.Is(err, fault.Unavailable) || !strings.Contains(said, "cannot start registry.test:5000/team/app") || strings.Contains(said, "kubelet") || !strings.Contains(err.Error(), words) {
			t.Errorf("%v", err)
		}
	}
	var pod corev1.Pod
	pod.Annotations = map[string]string{"cove.dev/image": "registry.test/a@" + manifest}
	pod.Status.Phase = corev1.PodFailed
	pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "seed", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 128, Reason: "StartError", Message: words}}}}
	if end := kubernetes.EndOf(&pod); strings.Contains(end.Message, "kubelet") {
		t.Errorf("%+v", end)
	}
}

// The address of a Pod that has ended answers nobody, not even with a refusal.
func TestAPodThatEndsWhileItIsAskedIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	const address = "127.88.0.1"
	silent, err := net.Listen("tcp", net.JoinHostPort(address, fmt.Sprint(podapi.Port)))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a := newAPI(t)
	d := imagesDriver(t, a, &kubernetes.Template{})
	made, err := d.AddImage(t.Context(), imageRequest(nil))
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		failed <- d.Start(ctx, sandbox.StartRequest{ID: "sb-1", Tenant: "acme", Template: made, Network: policy.Network{Mode: policy.None}})
	}()
	eventually(t, "a Pod", func() bool { return a.pods("claimed") == 1 })
	say := func(status object) {
		a.change(a.podNames()[0], func(o object) string { o["status"] = status; return "MODIFIED" })
	}
	say(object{"phase": "Pending", "podIP": address})
	conn, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	say(object{"phase": "Failed", "podIP": address, "initContainerStatuses": []any{object{"name": "seed", "state": object{"terminated": object{
		"exitCode": 128, "reason": "StartError", "message": "no such file",
	}}}}})
	select {
	case err := <-failed:
		if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "cannot start") {
			t.Errorf("%v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it is still waited for")
	}
}

func TestATenantHasFewImagesPulledAtATime(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	d := imagesDriver(t, a, &kubernetes.Template{})
	start := func(tenant, id string) {
		made, err := d.AddImage(t.Context(), imageRequest(func(r *sandbox.ImageRequest) { r.Tenant = tenant }))
		if err != nil {
			t.Error(err)
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err = d.Start(ctx, sandbox.StartRequest{ID: id, Tenant: tenant, Template: made, Network: policy.Network{Mode: policy.None}}) // no Pod ever runs here
		if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "cannot pull") {
			t.Errorf("%s: %v", id, err)
		}
	}
	var work sync.WaitGroup
	for n := range 6 {
		work.Go(func() { start("acme", fmt.Sprintf("sb-%d", n)) })
	}
	eventually(t, "as many Pods as may be", func() bool { return a.pods("claimed") == 4 })
	work.Go(func() { start("globex", "sb-globex") })
	eventually(t, "another tenant's", func() bool { return a.pods("claimed") == 5 })
	if n := a.count("POST pods"); n != 5 { // which began later than all of the other's
		t.Errorf("%d Pods were made", n)
	}
	ended := map[string]bool{}
	end := func(status object) {
		for _, name := range a.podNames() {
			if !ended[name] {
				ended[name] = true
				a.change(name, func(o object) string { o["status"] = status; return "MODIFIED" })
			}
		}
	}
	// A Pod whose image is there makes room although it has not started.
	end(object{"phase": "Pending", "podIP": "127.0.0.1", "initContainerStatuses": []any{object{"name": "seed", "state": object{"running": object{}}}}})
	eventually(t, "the next", func() bool { return a.pods("claimed") == 7 })
	clear(ended)
	end(waiting("ErrImagePull", "no"))
	work.Wait()
}

func TestATenantsStartsThatWaitForImagesAreCounted(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	d := imagesDriver(t, a, &kubernetes.Template{})
	made, err := d.AddImage(t.Context(), imageRequest(nil))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var refused, work sync.WaitGroup
	refused.Add(4)
	for n := range 20 {
		work.Go(func() {
			err := d.Start(ctx, sandbox.StartRequest{ID: fmt.Sprintf("sb-%d", n), Tenant: "acme", Template: made, Network: policy.Network{Mode: policy.None}})
			if ctx.Err() == nil {
				if !fault.Is(err, fault.Exhausted) || !strings.Contains(fault.Message(err), "16 sandboxes") {
					t.Errorf("%v", err)
				}
				refused.Done()
			}
		})
	}
	refused.Wait() // the others hold no more than that
	cancel()
	work.Wait()
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

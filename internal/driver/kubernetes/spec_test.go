package kubernetes_test

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/covehq/cove/internal/driver/kubernetes"
)

func made(t *testing.T, k kubernetes.Template) *corev1.Pod {
	t.Helper()
	pod, err := open(t, newAPI(t), "server-1", map[string]kubernetes.Template{"python": k}).Pod("python")
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func is[T comparable](t *testing.T, what string, got *T, want T) {
	t.Helper()
	if got == nil || *got != want {
		t.Errorf("%s is %v, not %v", what, reflect.ValueOf(got), want)
	}
}

func TestAPodIsHardened(t *testing.T) {
	pod := made(t, kubernetes.Template{Image: "img", Pool: 0})
	s := pod.Spec
	is(t, "automountServiceAccountToken", s.AutomountServiceAccountToken, false)
	is(t, "enableServiceLinks", s.EnableServiceLinks, false)
	is(t, "runAsNonRoot", s.SecurityContext.RunAsNonRoot, true)
	is(t, "runAsUser", s.SecurityContext.RunAsUser, int64(1000))
	if s.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("seccomp is not the runtime's default")
	}
	if s.HostNetwork || s.HostPID || s.HostIPC || s.RestartPolicy != corev1.RestartPolicyNever || s.ServiceAccountName != "" {
		t.Errorf("%+v", s)
	}
	for _, c := range append(s.InitContainers, s.Containers...) {
		is(t, c.Name+" privileged", c.SecurityContext.Privileged, false)
		is(t, c.Name+" allowPrivilegeEscalation", c.SecurityContext.AllowPrivilegeEscalation, false)
		is(t, c.Name+" readOnlyRootFilesystem", c.SecurityContext.ReadOnlyRootFilesystem, true)
		if caps := c.SecurityContext.Capabilities; !slices.Equal(caps.Drop, []corev1.Capability{"ALL"}) || len(caps.Add) > 0 {
			t.Errorf("%s has %+v", c.Name, caps)
		}
	}
	for _, v := range s.Volumes {
		if v.EmptyDir == nil || v.EmptyDir.SizeLimit == nil || v.EmptyDir.SizeLimit.IsZero() {
			t.Errorf("volume %s: %+v", v.Name, v.VolumeSource)
		}
	}
	for name, asked := range s.InitContainers[0].Resources.Requests {
		if own := s.Containers[0].Resources.Requests[name]; asked.Cmp(own) > 0 {
			t.Errorf("the init container asks for %s of %s, the sandbox for %s", &asked, name, &own)
		}
	}
	limits := s.Containers[0].Resources.Limits
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		if q := limits[name]; q.IsZero() {
			t.Errorf("no limit of %s", name)
		}
	}
}

func TestALooserPodIsRootWithFewCapabilities(t *testing.T) {
	pod := made(t, kubernetes.Template{Image: "img", Looser: true})
	main, install := pod.Spec.Containers[0], pod.Spec.InitContainers[0]
	is(t, "runAsUser", main.SecurityContext.RunAsUser, int64(0))
	is(t, "allowPrivilegeEscalation", main.SecurityContext.AllowPrivilegeEscalation, false)
	is(t, "readOnlyRootFilesystem", main.SecurityContext.ReadOnlyRootFilesystem, false)
	for _, c := range main.SecurityContext.Capabilities.Add {
		if strings.HasPrefix(string(c), "SYS_ADMIN") || c == "NET_ADMIN" || c == "SYS_PTRACE" || c == "NET_RAW" {
			t.Errorf("it has %s", c)
		}
	}
	if len(install.SecurityContext.Capabilities.Add) > 0 {
		t.Error("the init container has capabilities too")
	}
}

func TestAPodHoldsNothingOfItsTenant(t *testing.T) {
	pod := made(t, kubernetes.Template{Image: "img", Env: map[string]string{"A": "b"}})
	raw, err := json.Marshal(pod.Spec)
	if err != nil {
		t.Fatal(err)
	}
	if len(pod.Spec.Containers[0].Env) != 1 || strings.Contains(string(raw), "secretKeyRef") {
		t.Errorf("%s", raw)
	}
}

func TestADigestIsOfWhatAPodIsMadeFrom(t *testing.T) {
	a := newAPI(t)
	digest := func(k kubernetes.Template) string {
		return open(t, a, "server-1", map[string]kubernetes.Template{"python": k}).Digest("python")
	}
	first := digest(kubernetes.Template{Image: "img"})
	if digest(kubernetes.Template{Image: "img", Pool: 3, Description: "d"}) != first {
		t.Error("another size of the pool makes another Pod")
	}
	for name, k := range map[string]kubernetes.Template{
		"image": {Image: "other"}, "preload": {Image: "img", Preload: []string{"json"}}, "looser": {Image: "img", Looser: true}, "memory": {Image: "img", Memory: 1 << 30},
	} {
		if digest(k) == first {
			t.Errorf("another %s makes the same Pod", name)
		}
	}
}

func TestWhatIsBeneathAPodIsItsTemplatesElseTheInstallations(t *testing.T) {
	a := newAPI(t)
	made := func(ofAll string, k kubernetes.Template) (corev1.PodSpec, string) {
		t.Helper()
		k.Image = "img"
		d, err := kubernetes.New(t.Context(), kubernetes.Config{
			Namespace: "boxes", Image: "cove", Owner: "server-1", Templates: map[string]kubernetes.Template{"python": k}, RuntimeClass: ofAll, Rest: a.config(),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		pod, err := d.Pod("python")
		if err != nil {
			t.Fatal(err)
		}
		return pod.Spec, d.Digest("python")
	}
	plain, first := made("", kubernetes.Template{})
	if plain.RuntimeClassName != nil || plain.HostUsers != nil {
		t.Errorf("unasked a Pod has %+v", plain)
	}
	for name, c := range map[string]struct {
		ofAll string
		k     kubernetes.Template
		class *string // nil: the cluster's own
		users *bool
	}{
		"the installation says a class": {ofAll: "gvisor", class: new("gvisor")},
		"the template says a class":     {k: kubernetes.Template{RuntimeClass: "kata"}, class: new("kata")},
		"both do":                       {ofAll: "gvisor", k: kubernetes.Template{RuntimeClass: "kata"}, class: new("kata")},
		"users are the Pod's own":       {k: kubernetes.Template{HostUsers: new(false)}, users: new(false)},
	} {
		spec, digest := made(c.ofAll, c.k)
		if !reflect.DeepEqual(spec.RuntimeClassName, c.class) || !reflect.DeepEqual(spec.HostUsers, c.users) {
			t.Errorf("%s: a Pod has %+v", name, spec)
		}
		if digest == first {
			t.Errorf("%s: Pods that wait would stay as they are", name)
		}
	}
}

func TestATemplateThatCannotBeMeantIsRefused(t *testing.T) {
	for name, k := range map[string]kubernetes.Template{
		"python": {}, "Python": {Image: "img"}, "negative": {Image: "img", Pool: -1}, "relative": {Image: "img", Writable: []string{"tmp"}},
		"root": {Image: "img", Writable: []string{"/"}}, "too-many": {Image: "img", Pool: 1 << 30}, strings.Repeat("x", 60): {Image: "img"},
	} {
		_, err := kubernetes.New(t.Context(), kubernetes.Config{
			Namespace: "boxes", Image: "cove", Owner: "x", Templates: map[string]kubernetes.Template{name: k}, Rest: newAPI(t).config(),
		})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

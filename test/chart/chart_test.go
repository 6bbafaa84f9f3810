package chart

import (
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the manifests anew")

const (
	dir       = "../../deploy/chart/cove"
	manifests = "../../deploy/manifests"
)

type object = map[string]any

// Plain manifests have their secrets from whoever installs them.
var plain = map[string]object{
	"cove.yaml": {"adminKey": object{"existingSecret": "cove-admin"}},
	"cove-ha.yaml": {
		"adminKey": object{"existingSecret": "cove-admin"}, "replicas": 2, "database": object{"existingSecret": "cove-database"},
	},
}

func render(t *testing.T, values object) string {
	t.Helper()
	text, err := Render(dir, "cove", "cove", values)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestTheManifestsAreTheChart(t *testing.T) {
	for name, values := range plain {
		t.Run(name, func(t *testing.T) {
			text := "# Made from deploy/chart/cove by `make manifests`: change that. How to use it is in docs/kubernetes.md.\n" +
				strings.ReplaceAll(render(t, values), "app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
			file := filepath.Join(manifests, name)
			if *update {
				if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			have, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if string(have) != text {
				t.Errorf("%s is not what the chart says: run make manifests", file)
			}
		})
	}
}

func TestWhatTheChartRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		values object
		says   string
	}{
		"two servers on SQLite":             {object{"replicas": 2}, "SQLite"},
		"as many as an autoscaler wants":    {object{"autoscaling": object{"enabled": true}}, "6 servers"},
		"sandboxes beside the server":       {object{"sandboxes": object{"namespace": "cove"}}, "sandboxes.namespace"},
		"a value that nobody reads":         {object{"replicaCount": 2}, "replicaCount"},
		"a key of a URL, instead of a name": {object{"database": object{"url": "postgres://u:p@h/d"}}, "url"},
		"no server at all":                  {object{"replicas": 0}, "replicas"},
		"images of no place":                {object{"sandboxes": object{"images": object{"enabled": true, "allow": []any{"python"}}}}, "allow"},
		"a pool of everybody's images":      {object{"sandboxes": object{"images": object{"enabled": true, "pool": 2}}}, "images"},
		"an account that nobody has named":  {object{"serviceAccount": object{"create": false}}, "serviceAccount.name"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Render(dir, "cove", "cove", c.values)
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("it says %v", err)
			}
		})
	}
}

// find decodes the objects of a kind, strictly: a field that Kubernetes does not know fails.
func find[T any](t *testing.T, text, kind string) []T {
	t.Helper()
	var all []T
	for document := range strings.SplitSeq(text, "---\n") {
		var head struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if head.Kind != kind {
			continue
		}
		var one T
		if err := yaml.UnmarshalStrict([]byte(document), &one); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		all = append(all, one)
	}
	return all
}

func TestTheServerHasFewRights(t *testing.T) {
	text := render(t, plain["cove-ha.yaml"])
	if strings.Contains(text, "kind: ClusterRole") {
		t.Error("rights reach beyond one namespace")
	}
	roles := find[rbacv1.Role](t, text, "Role")
	if len(roles) != 1 || roles[0].Namespace != "cove-sandboxes" {
		t.Fatalf("roles are %+v", roles)
	}
	for _, rule := range roles[0].Rules {
		for _, word := range slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs) {
			if strings.Contains(word, "*") || slices.Contains([]string{"pods/exec", "pods/attach", "pods/portforward", "deletecollection"}, word) {
				t.Errorf("it may %v %v", rule.Verbs, rule.Resources)
			}
		}
		if slices.Contains(rule.Resources, "secrets") && !slices.Equal(rule.Verbs, []string{"create"}) && !slices.Equal(rule.ResourceNames, []string{"cove-agents"}) {
			t.Errorf("it may %v any Secret", rule.Verbs)
		}
	}
}

func TestTheServersPod(t *testing.T) {
	for name, c := range map[string]struct {
		values   object
		strategy appsv1.DeploymentStrategyType
		secrets  []string
	}{
		"one server":  {plain["cove.yaml"], appsv1.RecreateDeploymentStrategyType, []string{"cove-admin"}},
		"two servers": {plain["cove-ha.yaml"], appsv1.RollingUpdateDeploymentStrategyType, []string{"cove-admin", "cove-database"}},
		"one server on Postgres": {object{"adminKey": object{"existingSecret": "cove-admin"}, "database": object{"existingSecret": "cove-database"}},
			appsv1.RecreateDeploymentStrategyType, []string{"cove-admin", "cove-database"}},
		"with its own façade's certificate": {object{"adminKey": object{"existingSecret": "cove-admin"}, "facade": object{"existingSecret": "cove-facade"}},
			appsv1.RecreateDeploymentStrategyType, []string{"cove-admin", "cove-facade"}},
		"with TLS": {object{"tls": object{"domain": "cove.example.com", "existingSecret": "cove-tls"}, "adminKey": object{"existingSecret": "cove-admin"}},
			appsv1.RecreateDeploymentStrategyType, []string{"cove-admin", "cove-tls"}},
	} {
		t.Run(name, func(t *testing.T) {
			all := find[appsv1.Deployment](t, render(t, c.values), "Deployment")
			if len(all) != 1 || all[0].Spec.Strategy.Type != c.strategy {
				t.Fatalf("deployments are %+v", all)
			}
			spec := all[0].Spec.Template.Spec
			secure(t, spec)
			var secrets []string
			for _, v := range spec.Volumes {
				if v.Secret != nil {
					secrets = append(secrets, v.Secret.SecretName)
				}
			}
			if !slices.Equal(secrets, c.secrets) {
				t.Errorf("it mounts %v", secrets)
			}
		})
	}
}

// secure is what the strictest of Kubernetes' own standards asks for, and a root directory that nothing writes to.
func secure(t *testing.T, spec corev1.PodSpec) {
	t.Helper()
	s := spec.SecurityContext
	if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("the Pod's security is %+v", s)
	}
	for _, c := range spec.Containers {
		s := c.SecurityContext
		if s == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("the security of container %s is %+v", c.Name, s)
		}
		if c.LivenessProbe == nil || c.ReadinessProbe == nil || c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
			t.Errorf("container %s has no probes", c.Name)
		}
	}
}

func TestAvailability(t *testing.T) {
	if found := find[policyv1.PodDisruptionBudget](t, render(t, plain["cove.yaml"]), "PodDisruptionBudget"); len(found) != 0 {
		t.Error("a budget for one server would keep nodes from being drained")
	}
	found := find[policyv1.PodDisruptionBudget](t, render(t, plain["cove-ha.yaml"]), "PodDisruptionBudget")
	if len(found) != 1 || found[0].Spec.MaxUnavailable.IntValue() != 1 {
		t.Errorf("budgets of two servers are %+v", found)
	}
}

func TestAnAutoscalerHasTheSayOverHowManyServersThereAre(t *testing.T) {
	if found := find[autoscalingv2.HorizontalPodAutoscaler](t, render(t, plain["cove-ha.yaml"]), "HorizontalPodAutoscaler"); len(found) != 0 {
		t.Errorf("unasked there is %+v", found)
	}
	text := render(t, object{
		"adminKey": object{"existingSecret": "cove-admin"}, "database": object{"existingSecret": "cove-database"},
		"autoscaling": object{"enabled": true, "minReplicas": 3, "maxReplicas": 9},
	})
	found := find[autoscalingv2.HorizontalPodAutoscaler](t, text, "HorizontalPodAutoscaler")
	deployments := find[appsv1.Deployment](t, text, "Deployment")
	if len(found) != 1 || len(deployments) != 1 {
		t.Fatalf("there are %d autoscalers of %d deployments", len(found), len(deployments))
	}
	least, load, window := int32(3), int32(70), int32(600)
	want := autoscalingv2.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: deployments[0].Name},
		MinReplicas:    &least, MaxReplicas: 9,
		Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricSource{
			Name: corev1.ResourceCPU, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: &load},
		}}},
		Behavior: &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleDown: &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: &window}},
	}
	if found[0].Namespace != deployments[0].Namespace || !reflect.DeepEqual(found[0].Spec, want) {
		t.Errorf("it is %+v", found[0])
	}
	if deployments[0].Spec.Replicas != nil {
		t.Errorf("every upgrade would go back to %d servers", *deployments[0].Spec.Replicas)
	}
	if c := deployments[0].Spec.Template.Spec.Containers[0]; c.Resources.Requests.Cpu().IsZero() {
		t.Error("without a request of processors there is nothing to take a share of")
	}
	if budgets := find[policyv1.PodDisruptionBudget](t, text, "PodDisruptionBudget"); len(budgets) != 1 || deployments[0].Spec.Strategy.Type != appsv1.RollingUpdateDeploymentStrategyType {
		t.Errorf("so many servers have budgets %+v and are replaced by %s", budgets, deployments[0].Spec.Strategy.Type)
	}
}

func TestTheRoutersService(t *testing.T) {
	services := func(namespace string, values object) map[string]corev1.Service {
		text, err := Render(dir, "cove", namespace, values)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]corev1.Service{}
		for _, s := range find[corev1.Service](t, text, "Service") {
			all[s.Namespace+"/"+s.Name] = s
		}
		return all
	}
	home := services("agent-sandbox-system", object{"router": object{"alias": true}})
	if s := home["agent-sandbox-system/sandbox-router-svc"]; len(home) != 2 || len(s.Spec.Selector) == 0 || s.Spec.Ports[0].Port != 8080 {
		t.Errorf("in the namespace where clients look: %+v", home)
	}
	away := services("cove", object{"router": object{"alias": true}})
	if s := away["agent-sandbox-system/sandbox-router-svc"]; s.Spec.ExternalName != "sandbox-router-svc.cove.svc.cluster.local" {
		t.Errorf("from elsewhere: %+v", away)
	}
}

func TestImagesAreTheOperatorsToAllow(t *testing.T) {
	configured := func(values object) string {
		t.Helper()
		for _, m := range find[corev1.ConfigMap](t, render(t, values), "ConfigMap") {
			if text, ok := m.Data["cove.toml"]; ok {
				_, images, _ := strings.Cut(text, "[kubernetes.images]")
				images, _, _ = strings.Cut(images, "\n  [") // the next section
				return images
			}
		}
		return ""
	}
	if text := configured(plain["cove.yaml"]); strings.TrimSpace(text) != "enabled = false" {
		t.Errorf("unasked it says %q", text)
	}
	text := configured(object{"sandboxes": object{"images": object{
		"enabled": true, "allow": []any{"docker.io/library/*"}, "memory": "1GiB", "cpus": 2, "looser": true, "pull_secrets": []any{"ours"},
	}}})
	for _, line := range []string{"enabled = true", `allow = ["docker.io/library/*"]`, `memory = "1GiB"`, "cpus = 2\n", "looser = true", `pull_secrets = ["ours"]`} {
		if !strings.Contains(text, line) {
			t.Errorf("%q lacks %q", text, line)
		}
	}
}

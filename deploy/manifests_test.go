package deploy_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/covehq/cove/internal/config"
)

// The chart, from which the manifests are made, has its own tests in test/chart. These say that the server understands what
// they tell it.
func TestTheServerTakesTheConfigurationOfTheManifests(t *testing.T) {
	for name, c := range map[string]struct {
		replicas int
		postgres bool
	}{"cove.yaml": {1, false}, "cove-ha.yaml": {2, true}} {
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("manifests", name))
			if err != nil {
				t.Fatal(err)
			}
			cfg := load(t, find[corev1.ConfigMap](t, text, "ConfigMap").Data["cove.toml"])
			spec := find[appsv1.Deployment](t, text, "Deployment").Spec
			if cfg.Driver != "kubernetes" || cfg.Server.Replicas != c.replicas || int(*spec.Replicas) != c.replicas || cfg.Database.Postgres() != c.postgres {
				t.Errorf("%d replicas with this configuration:\n%s", *spec.Replicas, cfg)
			}
			if !cfg.PlainEverywhere() {
				t.Error("the server refuses the plain HTTP that its Service brings")
			}
			mounts := spec.Template.Spec.Containers[0].VolumeMounts
			for _, file := range []string{cfg.DataDir, cfg.Auth.AdminKeyFile, cfg.Database.URLFile} {
				if file != "" && !below(mounts, file) {
					t.Errorf("nothing is mounted where %s should be", file)
				}
			}
		})
	}
}

func TestSeveralServersOnSQLiteAreRefused(t *testing.T) {
	text, err := os.ReadFile("manifests/cove.yaml")
	if err != nil {
		t.Fatal(err)
	}
	written := find[corev1.ConfigMap](t, text, "ConfigMap").Data["cove.toml"]
	_, err = parse(t, strings.Replace(written, "replicas = 1", "replicas = 2", 1))
	if err == nil || !strings.Contains(err.Error(), "SQLite") {
		t.Errorf("it says %v", err)
	}
}

func below(mounts []corev1.VolumeMount, file string) bool {
	for _, m := range mounts {
		if file == m.MountPath || strings.HasPrefix(file, m.MountPath+"/") {
			return true
		}
	}
	return false
}

func load(t *testing.T, text string) config.Config {
	t.Helper()
	cfg, err := parse(t, text)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func parse(t *testing.T, text string) (config.Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "cove.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config.Load(config.Source{File: file, Env: func(string) (string, bool) { return "", false }})
}

// find is the one object of its kind.
func find[T any](t *testing.T, text []byte, kind string) T {
	t.Helper()
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var head struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Fatal(err)
		}
		if head.Kind == kind {
			var found T
			if err := yaml.UnmarshalStrict([]byte(document), &found); err != nil {
				t.Fatal(err)
			}
			return found
		}
	}
	t.Fatalf("there is no %s", kind)
	return *new(T)
}

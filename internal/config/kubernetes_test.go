package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
)

const cluster = `
driver = "kubernetes"
[kubernetes]
image = "cove:1"
namespace = "boxes"
server_ranges = ["192.0.2.0/24"]
[kubernetes.templates.python]
image = "python:3.13-slim"
python = "/usr/local/bin/python3"
preload = ["pandas"]
pool = 4
memory = "1GiB"
[kubernetes.templates.python.env]
LANG = "C.UTF-8"
`

func load(t *testing.T, text string, env map[string]string) (config.Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "cove.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config.Load(config.Source{File: file, Env: from(env)})
}

func TestAClusterIsDescribed(t *testing.T) {
	c, err := load(t, cluster, map[string]string{"COVE_KUBERNETES_NAME": "server-1", "COVE_KUBERNETES_PULL_POLICY": "Never"})
	if err != nil {
		t.Fatal(err)
	}
	python := c.Kubernetes.Templates["python"]
	if me, err := c.Kubernetes.Me(); err != nil || me != "server-1" || c.Kubernetes.PullPolicy != "Never" || !c.Kubernetes.Policies {
		t.Errorf("%+v, %v", c.Kubernetes, err)
	}
	if python.Pool != 4 || python.Memory != 1<<30 || python.Env["LANG"] != "C.UTF-8" || len(c.Kubernetes.Nameservers) == 0 {
		t.Errorf("%+v", python)
	}
	if !strings.Contains(c.String(), "kubernetes.templates = [python]") {
		t.Errorf("%s", c)
	}
}

func TestImagesOfAClusterAreOffUnlessSaid(t *testing.T) {
	c, err := load(t, cluster, nil)
	if err != nil || c.Kubernetes.Images.Enabled {
		t.Errorf("%+v %v", c.Kubernetes.Images, err)
	}
	text := cluster + "[kubernetes.images]\nenabled = true\nallow = [\"docker.io/library/*\"]\nmemory = \"1GiB\"\n[kubernetes.images.env]\nPIP_INDEX_URL = \"https://pypi.example\"\n"
	c, err = load(t, text, map[string]string{"COVE_KUBERNETES_IMAGES_PULL_SECRETS": "a,b"})
	i := c.Kubernetes.Images
	if err != nil || !i.Enabled || i.Allow[0] != "docker.io/library/*" || i.Memory != 1<<30 || i.Env["PIP_INDEX_URL"] == "" || len(i.PullSecrets) != 2 {
		t.Errorf("%+v %v", i, err)
	}
}

func TestAClusterThatCannotBeMeantIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		old, new string
		want     string
	}{
		"no image":               {`image = "cove:1"`, "", "kubernetes.image"},
		"no template":            {"[kubernetes.templates.python]", "[template]\n#", "kubernetes.templates"},
		"a template of nothing":  {`image = "python:3.13-slim"`, "", "image is missing"},
		"a pool below zero":      {"pool = 4", "pool = -1", "negative"},
		"an unknown pull policy": {"pool = 4", `pull_policy = "sometimes"`, "sometimes"},
		"what is no range":       {"192.0.2.0/24", "192.0.2.1", "192.0.2.1"},
		"nobody may connect":     {`server_ranges = ["192.0.2.0/24"]`, "server_ranges = []\nnameservers = [\"x\"]", "x"},
		"an unknown setting":     {"pool = 4", "poool = 4", "poool"},
		"images of no place":     {"[kubernetes.templates.python.env]", "[kubernetes.images]\nallow = [\"python\"]\n[x]", "docker.io/library"},
		"images for no platform": {"[kubernetes.templates.python.env]", "[kubernetes.images]\nplatform = \"amd64\"\n[x]", "linux/amd64"},
		"images of no user":      {"[kubernetes.templates.python.env]", "[kubernetes.images]\nuid = -1\n[x]", "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(cluster, c.old, c.new, 1)
			if before, _, ok := strings.Cut(text, "[x]"); ok {
				text = before
			}
			if name == "no template" {
				text, _, _ = strings.Cut(text, "[template]")
			}
			if _, err := load(t, text, nil); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v", err)
			}
		})
	}
	if _, err := load(t, "", map[string]string{"COVE_KUBERNETES_TEMPLATES": "x"}); err == nil || !strings.Contains(err.Error(), "configuration file") {
		t.Errorf("%v", err)
	}
}

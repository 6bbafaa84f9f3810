package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/covehq/cove/client"
)

// Sandboxes from images that a cluster's node pulls, from a registry that the test serves on the cluster's link to this machine.

const clusterImagesConfig = `driver = "kubernetes"
[sandbox]
default_template = "python"
[images]
insecure_registries = [%[6]q]
[kubernetes]
kubeconfig = %[1]q
namespace = %[2]q
image = %[3]q
pull_policy = "Never"
name = "images"
server_ranges = [%[4]q]
[kubernetes.templates.python]
image = %[5]q
pull_policy = "Never"
python = "/usr/bin/python3"
[kubernetes.images]
enabled = true
allow = ["%[6]s/*", "%[6]s/private/*", "127.0.0.1:1/*"]
cpu_request = 0.01
memory_request = "32MiB"
%[7]s
`

// clusterImages is a server beside the cluster with a namespace of its own in it, and a registry.
type clusterImages struct {
	*server
	registry  *testRegistry
	namespace string
}

// kubectl speaks to the cluster.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("kubectl", append([]string{"--kubeconfig", os.Getenv("COVE_TEST_KUBECONFIG")}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// clusterRegistry is one that the node can pull from, over plain HTTP.
func clusterRegistry(t *testing.T) *testRegistry {
	t.Helper()
	link, err := netip.ParsePrefix(os.Getenv("COVE_TEST_SERVER_RANGE"))
	if err != nil {
		t.Fatal(err)
	}
	r := startRegistryAt(t, netip.AddrPortFrom(link.Addr(), 0).String())
	dir := filepath.Join(os.Getenv("COVE_TEST_CLUSTER"), "node", "registries", r.host)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	hosts := fmt.Sprintf("server = \"http://%[1]s\"\n[host.\"http://%[1]s\"]\ncapabilities = [\"pull\", \"resolve\"]\n", r.host) // containerd 1.6 wants both
	if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644); err != nil {
		t.Fatal(err)
	}
	return r
}

func newClusterImages(t *testing.T, level, settings string) *clusterImages {
	t.Helper()
	for _, name := range []string{"COVE_TEST_KUBECONFIG", "COVE_TEST_CLUSTER", "COVE_TEST_IMAGE", "COVE_TEST_POD_IMAGE", "COVE_TEST_SERVER_RANGE"} {
		if os.Getenv(name) == "" {
			t.Skipf("no cluster: %s is not set; `make test-cluster` starts one", name)
		}
	}
	program(t)
	c := &clusterImages{registry: clusterRegistry(t), namespace: fmt.Sprintf("e2e-images-%d-%s", os.Getpid(), level)}
	kubectl(t, "create", "namespace", c.namespace)
	t.Cleanup(func() { kubectl(t, "delete", "namespace", c.namespace, "--timeout=2m") })
	kubectl(t, "label", "namespace", c.namespace, "pod-security.kubernetes.io/enforce="+level)
	kubectl(t, "create", "secret", "docker-registry", "nodes-own", "-n", c.namespace, "--docker-server="+c.registry.host,
		"--docker-username="+registryUser, "--docker-password="+registryPassword)
	dir := t.TempDir()
	file := filepath.Join(dir, "cove.toml")
	text := fmt.Sprintf(clusterImagesConfig, os.Getenv("COVE_TEST_KUBECONFIG"), c.namespace, os.Getenv("COVE_TEST_IMAGE"), os.Getenv("COVE_TEST_SERVER_RANGE"),
		os.Getenv("COVE_TEST_POD_IMAGE"), c.registry.host, settings)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c.server = &server{dir: filepath.Join(dir, "data"), env: []string{"COVE_CONFIG=" + file, "COVE_AGENT_SANDBOX_LISTEN=127.0.0.1:0"}}
	if err := os.Mkdir(c.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the server said:\n%s", c.said)
		}
	})
	c.start(t)
	return c
}

// push makes an image of the registry's base and some files.
func (c *clusterImages) push(t *testing.T, ref string, config v1.Config, entries ...entry) string {
	t.Helper()
	base, err := busyboxLayer()
	if err != nil {
		t.Fatal(err)
	}
	python, err := pythonFiles()
	if err != nil {
		t.Fatal(err)
	}
	b := &imageBuilder{images: map[string]v1.Image{}}
	img := b.image(ref, config, base, b.layer(python...), b.layer(entries...))
	if b.err != nil {
		t.Fatal(b.err)
	}
	tag, err := name.NewTag(c.registry.host + "/" + ref)
	if err == nil {
		err = remote.Write(tag, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return tag.String()
}

// inside is what a shell says in a sandbox.
func inside(t *testing.T, sb *client.Sandbox, script string) string {
	t.Helper()
	r, err := sb.Exec(t.Context(), client.ExecRequest{Command: script})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return r.Stdout + r.Stderr
}

// pods are those of sandboxes.
func (c *clusterImages) pods(t *testing.T) string {
	t.Helper()
	return kubectl(t, "get", "pods", "-n", c.namespace, "-l", "cove.dev/state=claimed", "-o", "name")
}

func (c *clusterImages) nothingLeft(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); c.pods(t) != ""; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("left: %s", c.pods(t))
		}
	}
}

func TestClusterImages(t *testing.T) {
	c := newClusterImages(t, "restricted", "")
	app := c.push(t, "app:1", v1.Config{Env: []string{"PATH=/bin:/usr/bin", "FROM_IMAGE=yes"}, WorkingDir: "/app", Cmd: []string{"sh"}, Volumes: map[string]struct{}{"/data": {}}},
		file("/data/kept", 0o644, "kept\n"),
		file("/app/main.py", 0o644, "print(1)\n"), dir("/app/sub", 0o755), file("/home/node/.profile", 0o644, "x\n"),
		file("/etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nnode:x:1000:1000:node:/home/node:/bin/sh\n"))

	t.Run("a hardened Pod has the image's files, variables, directory and python3", func(t *testing.T) {
		begun := time.Now()
		sb, err := c.Create(t.Context(), client.CreateRequest{Image: app})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("pulled and started in %v", time.Since(begun))
		want := "1000\n/app\nyes\n/home/node\nprint(1)\nx\nwritten\n"
		if got := inside(t, sb, "id -u; pwd; echo $FROM_IMAGE; echo $HOME; cat main.py ~/.profile; echo written >> sub/new && cat sub/new"); got != want {
			t.Errorf("%q", got)
		}
		if got := inside(t, sb, "echo x > /etc/made-by; cat /etc/made-by"); !strings.Contains(got, "the test") {
			t.Errorf("%q", got)
		}
		if got := inside(t, sb, "cat /data/kept; echo x > /data/new && grep ' /data ' /proc/self/mountinfo"); !strings.HasPrefix(got, "kept\n") || !strings.Contains(got, "empty-dir") {
			t.Errorf("what the image calls a volume is not ours, which has a size: %q", got)
		}
		out, err := sb.Run(t.Context(), client.RunRequest{Code: "import os\nprint(os.getcwd(), os.environ['FROM_IMAGE'], os.path.exists('main.py'))"})
		if err != nil || !strings.Contains(out.Stdout, "/app yes True") {
			t.Errorf("%+v %v", out, err)
		}
		begun = time.Now()
		again, err := c.Create(t.Context(), client.CreateRequest{Image: app})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("another started in %v", time.Since(begun))
		for _, s := range []*client.Sandbox{sb, again} {
			if err := s.Kill(t.Context()); err != nil {
				t.Error(err)
			}
		}
		c.nothingLeft(t)
	})
	t.Run("an image without a shell starts, and says what it lacks", func(t *testing.T) {
		sb, err := c.Create(t.Context(), client.CreateRequest{Image: c.registry.host + "/scratch:1"})
		if err != nil {
			t.Fatal(err)
		}
		defer sb.Kill(t.Context())
		if r, err := sb.Exec(t.Context(), client.ExecRequest{Argv: []string{"/busybox", "echo", "from scratch"}}); err != nil || r.Stdout != "from scratch\n" {
			t.Errorf("%+v %v", r, err)
		}
		if _, err := sb.Exec(t.Context(), client.ExecRequest{Command: "echo x"}); err == nil || !strings.Contains(err.Error(), "sh") {
			t.Errorf("%v", err)
		}
		if _, err := sb.Run(t.Context(), client.RunRequest{Code: "1"}); err == nil || !strings.Contains(err.Error(), "python3") {
			t.Errorf("%v", err)
		}
	})
	t.Run("what cannot be had is told at once, and nothing is left", func(t *testing.T) {
		for ref, want := range map[string]string{
			c.registry.host + "/none:1": "no image", c.registry.host + "/foreign:1": "s390x", c.registry.host + "/private/busybox:1": "login",
			"docker.io/library/alpine:3": "allows images by name",
		} {
			begun := time.Now()
			_, err := c.Create(t.Context(), client.CreateRequest{Image: ref})
			if err == nil || !strings.Contains(err.Error(), want) || time.Since(begun) > 10*time.Second {
				t.Errorf("%s after %v: %v", ref, time.Since(begun), err)
			}
		}
		begun := time.Now()
		_, err := c.Create(t.Context(), client.CreateRequest{Image: c.registry.host + "/broken:1"}) // which only the node finds out
		if err == nil || !strings.Contains(err.Error(), "nodes cannot pull") || time.Since(begun) > 30*time.Second {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
		c.nothingLeft(t)
	})
	t.Run("an image does not bring the program that is PID 1", c.coveredProgram)
	t.Run("a Sandbox of agent-sandbox names an image", func(t *testing.T) {
		w := agentSandboxWorldOf(t, c.server, c.key)
		facade := func(stdin string, args ...string) string {
			t.Helper()
			cmd := exec.Command("kubectl", append([]string{"--kubeconfig", w.kubeconfig}, args...)...)
			cmd.Stdin = strings.NewReader(stdin)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("kubectl %v: %v: %s", args, err, out)
			}
			return string(out)
		}
		facade(fmt.Sprintf("apiVersion: agents.x-k8s.io/v1beta1\nkind: Sandbox\nmetadata: {name: mine}\nspec: {podTemplate: {spec: {containers: [{name: main, image: %q}]}}}\n", app), "create", "-f", "-")
		facade("", "wait", "sandbox/mine", "--for=condition=Ready", "--timeout=60s")
		seen := 0
		for info, err := range c.List(t.Context(), client.ListRequest{Metadata: map[string]string{"agents.x-k8s.io/name": "mine"}}) {
			if err != nil {
				t.Fatal(err)
			}
			seen++
			if got := inside(t, c.Sandbox(info.ID), "echo $FROM_IMAGE"); got != "yes\n" {
				t.Errorf("%q", got)
			}
		}
		if seen != 1 {
			t.Errorf("there are %d sandboxes", seen)
		}
		facade("", "delete", "sandbox", "mine")
		c.nothingLeft(t)
	})
	t.Run("an image is its tenant's, and there after a restart", func(t *testing.T) {
		info, err := c.Image(t.Context(), app)
		if err != nil {
			t.Fatal(err)
		}
		key, err := c.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
		if err != nil {
			t.Fatal(err)
		}
		foreign, err := client.New(c.url, key.Secret)
		if err != nil {
			t.Fatal(err)
		}
		defer foreign.Close()
		var refused *client.Error
		if _, err := foreign.Create(t.Context(), client.CreateRequest{Template: info.Template}); !errors.As(err, &refused) || refused.Status != 404 {
			t.Errorf("%v", err)
		}
		if list, err := foreign.Images(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("%+v %v", list, err)
		}
		c.signal(t, syscall.SIGTERM)
		c.start(t)
		asked := c.registry.asked.Load()
		sb, err := c.Create(t.Context(), client.CreateRequest{Template: info.Template})
		if err != nil {
			t.Fatal(err)
		}
		if got := inside(t, sb, "cat /app/main.py"); got != "print(1)\n" {
			t.Errorf("%q", got)
		}
		if n := c.registry.asked.Load() - asked; n != 0 {
			t.Errorf("the registry was asked %d times for what is there", n)
		}
		if err := sb.Kill(t.Context()); err != nil {
			t.Error(err)
		}
		if err := c.RemoveImage(t.Context(), app); err != nil {
			t.Error(err)
		}
		if _, err := c.Create(t.Context(), client.CreateRequest{Template: info.Template}); err == nil {
			t.Error("an image that was removed is still there")
		}
		c.nothingLeft(t)
	})
}

// tellTale is in the log of a container, or in a volume, where a program of the image's ran in the place of ours.
const tellTale = "a program of the image ran"

// coveredProgram: an image wants a volume, or begins, at a link to where our program was, and has one of that name there. A node mounts what has more parts later.
func (c *clusterImages) coveredProgram(t *testing.T) {
	hostile := file("/run/cove/cove-pod", 0o755, "#!/bin/sh\necho "+tellTale+"\nfor dir in /data /app /run/*-seed/data /run/*-seed/app; do echo "+tellTale+" > $dir/tell-tale; done\n[ \"$1\" = seed ] || sleep 30\n")
	volumes := func(names ...string) map[string]struct{} {
		all := map[string]struct{}{"/data": {}}
		for _, name := range names {
			all[name] = struct{}{}
		}
		return all
	}
	for name, i := range map[string]struct {
		config  v1.Config
		link    string
		refused string
	}{
		"volume":         {v1.Config{Volumes: volumes("/x/y/z")}, "/run/cove", ""},
		"unclean-volume": {v1.Config{Volumes: volumes("/x/y/z/../z")}, "/run/cove", ""},
		"workdir":        {v1.Config{Volumes: volumes(), WorkingDir: "/x/y/z"}, "/run/cove", ""},
		"parent":         {v1.Config{Volumes: volumes("/x/y/z")}, "/run", "cannot start"},
		"root":           {v1.Config{Volumes: volumes("/x/y/z")}, "/", "cannot start"},
	} {
		t.Run(name, func(t *testing.T) {
			i.config.Env = []string{"PATH=/bin:/usr/bin"}
			ref := c.push(t, "covered-"+name+":1", i.config, dir("/run/cove", 0o755), hostile, dir("/x/y", 0o755), link("/x/y/z", i.link), dir("/data", 0o777), dir("/app", 0o777))
			defer c.nothingLeft(t)
			ctx, cancel := context.WithCancel(t.Context())
			logs := make(chan string, 1)
			go func() { logs <- c.logs(ctx) }()
			defer func() {
				cancel()
				if said := <-logs; strings.Contains(said, tellTale) {
					t.Errorf("%s", said)
				}
			}()
			sb, err := c.Create(t.Context(), client.CreateRequest{Image: ref})
			if i.refused != "" || err != nil {
				if err == nil || i.refused == "" || !strings.Contains(err.Error(), i.refused) {
					t.Errorf("%v", err)
				}
			}
			if err != nil {
				return
			}
			defer func() {
				if err := sb.Kill(t.Context()); err != nil {
					t.Error(err)
				}
			}()
			if got := inside(t, sb, "cat /data/tell-tale /app/tell-tale 2>&1; tr '\\0' ' ' < /proc/1/cmdline"); strings.Contains(got, tellTale) || !strings.Contains(got, "/cove-pod serve") {
				t.Errorf("%q", got)
			}
		})
	}
}

// logs is what all containers have said, until ctx is done.
func (c *clusterImages) logs(ctx context.Context) string {
	var all strings.Builder
	for ctx.Err() == nil {
		out, err := exec.CommandContext(ctx, "kubectl", "--kubeconfig", os.Getenv("COVE_TEST_KUBECONFIG"), "logs", "-n", c.namespace, "-l", "cove.dev/state=claimed", "--all-containers").CombinedOutput()
		if err == nil { // there may be no container yet, or no more
			all.Write(out)
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return all.String()
}

// TestClusterImagesSDK is OpenSandbox's suite about images with Pods that are their image's user. The node has a password that tenants have to know too.
func TestClusterImagesSDK(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-cluster runs it")
	}
	c := newClusterImages(t, "baseline", "looser = true\npull_secrets = [\"nodes-own\"]")
	foreign, err := c.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	tools := openSandboxPackages(t)
	w := &openSandboxWorld{server: c.server, foreign: foreign.Secret, registry: c.registry}
	// Layers are the node's to unpack, which keeps what a hostile one holds inside.
	runSuite(t, tools.pytest(t, tools.python, "test_images.py", "-k=not snapshot and not hostile"), w.suite(t))
	c.nothingLeft(t)
}

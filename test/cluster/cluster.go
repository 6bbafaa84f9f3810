package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Addresses of the namespace. The host's end of the link plays the world outside: it has an address that is nobody's
// private one, for policies that allow the internet and nothing inside.
const (
	nodeServer      = "https://" + nodeAddress + ":6443"
	hostAddress     = "10.251.0.1"
	nodeAddress     = "10.251.0.2"
	outsideAddress  = "198.51.100.1" // of a range that is kept for documentation
	linkBits        = "/30"
	podRange        = "10.252.0.0/24"
	serviceRange    = "10.253.0.0/24"
	serviceAddress  = "10.253.0.1" // of the API server
	namespace       = "cove-kube"  // of the network
	hostLink        = "cove-kube0"
	nodeName        = "n1"
	version         = "1.34.4"
	pauseImage      = "localhost/pause:1"
	sandboxImage    = "localhost/cove-sandbox:test"
	coveImage       = "cove:dev" // as make image names it
	usualThreshold  = "200Mi"
	neededMemory    = 2 << 30
	neededDiskSpace = 3 << 30
)

// cluster is where everything is. All that it knows between two calls is in its directory.
type cluster struct {
	dir   string // of this cluster; removed by down
	cache string // of programs and images; stays
	bin   string // the programs
	repo  string // the checkout
	bare  bool   // only the API
	out   io.Writer
	log   io.Writer
	began time.Time
}

func newCluster(dir string, bare bool, out, log io.Writer) (*cluster, error) {
	repo, err := checkout()
	if err != nil {
		return nil, err
	}
	caches, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	cache := filepath.Join(caches, "cove-test", "kube")
	if dir == "" {
		dir = filepath.Join(cache, "cluster")
		if bare {
			dir = filepath.Join(cache, "api")
		}
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	key, err := digest(filepath.Join(repo, "test/cluster/kube"), "go.mod", "go.sum", "main.go", "policy.go")
	if err != nil {
		return nil, err
	}
	return &cluster{
		dir: dir, cache: cache, bin: filepath.Join(cache, key, "bin"), repo: repo, bare: bare, out: out, log: log, began: time.Now(),
	}, nil
}

// checkout finds the top of this repository from wherever in it the command runs.
func checkout() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "test/cluster/kube/go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("run this inside a checkout of Cove")
		}
		dir = filepath.Dir(dir)
	}
}

// digest names a build by what it is made from.
func digest(dir string, names ...string) (string, error) {
	h := sha256.New()
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n", name, len(data))
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func (c *cluster) path(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

func (c *cluster) say(format string, args ...any) {
	fmt.Fprintf(c.log, "cluster: %6.1fs %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

// up is a ladder; whoever calls it runs down when a rung breaks.
func (c *cluster) up(ctx context.Context) error {
	for _, d := range []string{"pki", "log", "pid", "node/cni", "node/kubelet", "node/" + registries} {
		if err := os.MkdirAll(c.path(d), 0o755); err != nil {
			return err
		}
	}
	if c.bare {
		return c.upBare(ctx)
	}
	if err := c.saveSysctls(); err != nil {
		return err
	}
	if err := c.makeNetwork(ctx); err != nil {
		return err
	}
	if err := c.makeKeys(nodeAddress, "6443"); err != nil {
		return err
	}
	if err := c.writeNode(); err != nil {
		return err
	}
	if err := c.start(ctx, c.parts()["containerd"]); err != nil {
		return err
	}
	imported := c.importMeanwhile(ctx)
	err := c.upControl(ctx)
	if err := errors.Join(err, <-imported); err != nil {
		return err
	}
	for _, name := range []string{"kubelet", "kube-proxy", "network-policy"} {
		if err := c.start(ctx, c.parts()[name]); err != nil {
			return err
		}
	}
	if err := c.waitServiceAccount(ctx); err != nil {
		return err
	}
	c.say("the node is ready")
	return c.publish()
}

func (c *cluster) upControl(ctx context.Context) error {
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		if err := c.start(ctx, c.parts()[name]); err != nil {
			return err
		}
	}
	c.say("the API answers")
	return nil
}

// importMeanwhile fills the node's images while the API starts; whoever calls it waits for the answer.
func (c *cluster) importMeanwhile(ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() {
		err := c.importImages(ctx, c.imageFile("pause"), c.imageFile("sandbox"))
		c.say("the images are there")
		done <- err
	}()
	return done
}

// upBare needs no privilege: two processes on ports that were free a moment ago.
func (c *cluster) upBare(ctx context.Context) error {
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("ports"), []byte(ports[0]+" "+ports[1]+" "+ports[2]), 0o600); err != nil {
		return err
	}
	if err := c.makeKeys("127.0.0.1", ports[0]); err != nil {
		return err
	}
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if err := c.start(ctx, c.parts()[name]); err != nil {
			return err
		}
	}
	c.say("the API answers")
	return c.publish()
}

// publish says by a file that the cluster can be used, and how.
func (c *cluster) publish() error {
	data, err := os.ReadFile(c.path("pki/admin.kubeconfig"))
	if err != nil {
		return err
	}
	return c.write("kubeconfig", data)
}

func freePorts(n int) ([]string, error) {
	var ports []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() //nolint:gocritic // all of them are held until all are known
		_, port, _ := net.SplitHostPort(l.Addr().String())
		ports = append(ports, port)
	}
	return ports, nil
}

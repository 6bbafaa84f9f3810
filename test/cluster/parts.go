package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// stopping is the order in which parts end: an API server that has lost its etcd hangs, a kubelet that has lost its
// containerd complains.
var stopping = []string{
	"network-policy", "kube-proxy", "kubelet", "containerd", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd", "postgres",
}

func (c *cluster) part(args []string) (part, error) {
	all := c.parts()
	if len(args) != 1 || all[args[0]].name == "" {
		return part{}, fmt.Errorf("name one part of %s", strings.Join(slices.Sorted(maps.Keys(all)), ", "))
	}
	return all[args[0]], nil
}

func (c *cluster) parts() map[string]part {
	address, ports := nodeAddress, []string{"6443", "2379", "2380"}
	if c.bare {
		address = "127.0.0.1"
		data, _ := os.ReadFile(c.path("ports")) // without it nothing was started
		if ports = strings.Fields(string(data)); len(ports) != 3 {
			return nil
		}
	}
	etcd, peer := "http://127.0.0.1:"+ports[1], "http://127.0.0.1:"+ports[2]
	all := map[string]part{}
	add := func(name string, limit time.Duration, ready func(context.Context) (bool, error), args ...string) {
		all[name] = part{name: name, limit: limit, ready: ready, args: append([]string{filepath.Join(c.bin, name)}, args...)}
	}
	add("etcd", 20*time.Second, atOnce, "--data-dir="+c.path("etcd"), "--listen-client-urls="+etcd, "--advertise-client-urls="+etcd,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer, "--unsafe-no-fsync", "--log-level=warn")
	add("kube-apiserver", time.Minute, c.answers("https://"+address+":"+ports[0]),
		"--etcd-servers="+etcd, "--bind-address="+bindAddress(c.bare), "--advertise-address="+address, "--secure-port="+ports[0],
		"--tls-cert-file="+c.path("pki/apiserver.crt"), "--tls-private-key-file="+c.path("pki/apiserver.key"), "--client-ca-file="+c.path("pki/ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.path("pki/tokens.pub"),
		"--service-account-signing-key-file="+c.path("pki/tokens.key"), "--service-cluster-ip-range="+serviceRange,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--endpoint-reconciler-type="+reconciler(c.bare),
		"--kubelet-client-certificate="+c.path("pki/kubelet-client.crt"), "--kubelet-client-key="+c.path("pki/kubelet-client.key"),
		"--kubelet-certificate-authority="+c.path("pki/ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--requestheader-client-ca-file="+c.path("pki/ca.crt"), "--requestheader-allowed-names=front-proxy",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+c.path("pki/front-proxy.crt"), "--proxy-client-key-file="+c.path("pki/front-proxy.key"),
		// Accepting a dead client's connection for a minute is what a restart would wait for.
		"--shutdown-delay-duration=0s")
	if c.bare {
		return all
	}
	// Controllers act as an administrator: an account for each of them costs six seconds at every start.
	add("kube-controller-manager", 30*time.Second, atOnce,
		"--kubeconfig="+c.path("pki/admin.kubeconfig"), "--authentication-kubeconfig="+c.path("pki/controllers.kubeconfig"),
		"--authorization-kubeconfig="+c.path("pki/controllers.kubeconfig"), "--kube-api-qps=500", "--kube-api-burst=1000", "--leader-elect=false",
		"--bind-address=127.0.0.1", "--service-account-private-key-file="+c.path("pki/tokens.key"), "--root-ca-file="+c.path("pki/ca.crt"),
		"--cluster-signing-cert-file="+c.path("pki/ca.crt"), "--cluster-signing-key-file="+c.path("pki/ca.key"),
		"--allocate-node-cidrs=true", "--cluster-cidr="+podRange, "--node-cidr-mask-size=24", "--service-cluster-ip-range="+serviceRange,
		"--node-monitor-grace-period=20s")
	add("kube-scheduler", 30*time.Second, atOnce,
		"--kubeconfig="+c.path("pki/scheduler.kubeconfig"), "--authentication-kubeconfig="+c.path("pki/scheduler.kubeconfig"),
		"--authorization-kubeconfig="+c.path("pki/scheduler.kubeconfig"), "--bind-address=127.0.0.1", "--leader-elect=false")
	add("kubelet", time.Minute, c.nodeReady,
		"--config="+c.path("node/kubelet.json"), "--kubeconfig="+c.path("pki/node.kubeconfig"), "--hostname-override="+nodeName,
		"--node-ip="+nodeAddress, "--root-dir="+c.path("node/kubelet"), "--cert-dir="+c.path("node/kubelet/pki"))
	add("kube-proxy", 30*time.Second, atOnce, "--config="+c.path("node/proxy.json"))
	add("network-policy", 30*time.Second, atOnce, c.path("pki/admin.kubeconfig"), nodeName, serviceRange)
	all["containerd"] = part{
		name: "containerd", limit: 20 * time.Second, args: []string{"containerd", "--config", c.path("node/containerd.toml")}, ready: c.containerdReady,
	}
	all["postgres"] = c.postgres()
	return all
}

func bindAddress(bare bool) string {
	if bare {
		return "127.0.0.1"
	}
	return "0.0.0.0"
}

// reconciler: where Pods run they find the API server through its Service; a bare API has nobody to find it, and its
// address on loopback would be refused.
func reconciler(bare bool) string {
	if bare {
		return "none"
	}
	return "lease"
}

// atOnce is for parts whose work shows elsewhere.
func atOnce(context.Context) (bool, error) { return true, nil }

// answers tells whether the API server says that it is ready.
func (c *cluster) answers(server string) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		_, err := c.get(ctx, server+"/readyz")
		return err == nil, err
	}
}

// get asks the API server as an administrator; whatever is not a success is an error.
func (c *cluster) get(ctx context.Context, url string) ([]byte, error) {
	pair, err := tls.LoadX509KeyPair(c.path("pki/admin.crt"), c.path("pki/admin.key"))
	if err != nil {
		return nil, errStop{err}
	}
	ca, err := os.ReadFile(c.path("pki/ca.crt"))
	if err != nil {
		return nil, errStop{err}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool, MinVersion: tls.VersionTLS12}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", response.Status, body)
	}
	return body, err
}

func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return tell(ctx, filepath.Join(c.bin, "kubectl"), append([]string{"--kubeconfig", c.path("pki/admin.kubeconfig"), "--request-timeout=10s"}, args...)...)
}

// nodeReady asks the kubelet's own port too: a node stays Ready for a while without one.
func (c *cluster) nodeReady(ctx context.Context) (bool, error) {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", nodeAddress+":10250")
	if err != nil {
		return false, err
	}
	conn.Close()
	body, err := c.get(ctx, nodeServer+"/api/v1/nodes/"+nodeName)
	if err != nil {
		return false, err
	}
	var node struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := json.Unmarshal(body, &node); err != nil {
		return false, err
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == "Ready" {
			return condition.Status == "True", errors.New(condition.Message)
		}
	}
	return false, errors.New("the node has said nothing yet")
}

// waitServiceAccount waits for the first thing that controllers make and every Pod needs.
func (c *cluster) waitServiceAccount(ctx context.Context) error {
	err := until(ctx, 30*time.Second, "the service account of namespace default", func(ctx context.Context) (bool, error) {
		_, err := c.get(ctx, nodeServer+"/api/v1/namespaces/default/serviceaccounts/default")
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, c.tail("kube-controller-manager"))
	}
	return nil
}

package main

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"text/template"
)

// writeNode writes what containerd, the CNI plugins, the kubelet and kube-proxy are told.
func (c *cluster) writeNode() error {
	// ptp and not bridge: what goes from Pod to Pod then passes through the node's own rules, where policies are enforced.
	network := object{
		"cniVersion": "1.0.0", "name": namespace,
		"plugins": []object{
			{"type": "ptp", "ipam": object{"type": "host-local", "dataDir": c.path("node/addresses"),
				"ranges": [][]object{{{"subnet": podRange}}}, "routes": []object{{"dst": "0.0.0.0/0"}}}},
			{"type": "portmap", "capabilities": object{"portMappings": true}},
		},
	}
	if err := c.writeJSON("node/cni/10-cove.conflist", network); err != nil {
		return err
	}
	if err := c.writeContainerd(); err != nil {
		return err
	}
	if err := c.writeKubelet(usualThreshold); err != nil {
		return err
	}
	return c.writeJSON("node/proxy.json", object{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "nftables", "clusterCIDR": podRange,
		"hostnameOverride": nodeName, "clientConnection": object{"kubeconfig": c.path("pki/proxy.kubeconfig")},
		"conntrack": object{"maxPerCore": 0}, // the table belongs to the whole machine
	})
}

type object = map[string]any

func (c *cluster) writeJSON(name string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return c.write(name, data)
}

// registries is the directory in which a test says how a registry of its own is spoken to: HOST:PORT/hosts.toml. containerd
// reads it at each pull.
const registries = "registries"

// containerdConfig is the form of 1.6 and 1.7, which Debian has. Machines without CAP_SYS_RESOURCE may not lower
// oom_score_adj: hence restrict_oom_score_adj.
var containerdConfig = template.Must(template.New("").Parse(`version = 2
root = {{.Root}}
state = {{.State}}
[grpc]
  address = {{.Socket}}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = {{.Pause}}
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = {{.Plugins}}
    conf_dir = {{.Networks}}
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = {{.Registries}}
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
`))

func (c *cluster) writeContainerd() error {
	file, err := os.OpenFile(c.path("node/containerd.toml"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = containerdConfig.Execute(file, map[string]string{
		"Root": strconv.Quote(c.path("node/containerd")), "State": strconv.Quote(c.path("node/run")), "Socket": strconv.Quote(c.socket()),
		"Pause": strconv.Quote(pauseImage), "Plugins": strconv.Quote("/usr/lib/cni"), "Networks": strconv.Quote(c.path("node/cni")), "Registries": strconv.Quote(c.path("node", registries)),
	})
	if closed := file.Close(); err == nil {
		err = closed
	}
	return err
}

func (c *cluster) socket() string { return c.path("node/containerd.sock") }

func (c *cluster) containerdReady(ctx context.Context) (bool, error) {
	_, err := tell(ctx, "ctr", "--address", c.socket(), "version")
	return err == nil, err
}

// writeKubelet takes the memory that must be available, or Pods are evicted.
func (c *cluster) writeKubelet(threshold string) error {
	return c.writeJSON("node/kubelet.json", object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": nodeAddress, "containerRuntimeEndpoint": "unix://" + c.socket(),
		"cgroupDriver": "cgroupfs", "failCgroupV1": false, "failSwapOn": false,
		"authentication": object{"anonymous": object{"enabled": false}, "webhook": object{"enabled": true}, "x509": object{"clientCAFile": c.path("pki/ca.crt")}},
		"authorization":  object{"mode": "Webhook"},
		"tlsCertFile":    c.path("pki/node.crt"), "tlsPrivateKeyFile": c.path("pki/node.key"),
		"podLogsDir": c.path("node/logs"), "volumePluginDir": c.path("node/plugins"), "resolvConf": "",
		"evictionHard":                object{"memory.available": threshold, "nodefs.available": "500Mi", "imagefs.available": "500Mi"},
		"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
		"nodeStatusUpdateFrequency": "5s", "syncFrequency": "10s", "shutdownGracePeriod": "0s", "serializeImagePulls": false, "maxPods": 200, "podPidsLimit": 4096,
	})
}

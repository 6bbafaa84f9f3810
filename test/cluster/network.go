package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// makeNetwork makes a namespace with one link to the host, so that what kube-proxy and policies do stays inside, and the
// routes by which programs on the host reach Pods and Services.
func (c *cluster) makeNetwork(ctx context.Context) error {
	for _, line := range []string{
		"netns add " + namespace,
		"link add " + hostLink + " type veth peer name eth0 netns " + namespace,
		"addr add " + hostAddress + linkBits + " dev " + hostLink,
		"addr add " + outsideAddress + "/32 dev " + hostLink,
		"link set " + hostLink + " up",
		"-n " + namespace + " link set lo up",
		"-n " + namespace + " addr add " + nodeAddress + linkBits + " dev eth0",
		"-n " + namespace + " link set eth0 up",
		"-n " + namespace + " route add default via " + hostAddress,
		"route add " + podRange + " via " + nodeAddress,
		"route add " + serviceRange + " via " + nodeAddress,
	} {
		if _, err := tell(ctx, "ip", strings.Fields(line)...); err != nil {
			return err
		}
	}
	_, err := tell(ctx, "nsenter", "--net=/run/netns/"+namespace, "--", "sysctl", "-qw", "net.ipv4.ip_forward=1")
	return err
}

// removeNetwork takes links and routes away with the namespace.
func removeNetwork(ctx context.Context) error {
	var failed error
	if _, err := os.Stat("/sys/class/net/" + hostLink); err == nil {
		if _, err := tell(ctx, "ip", "link", "del", hostLink); err != nil {
			failed = err
		}
	}
	if _, err := os.Stat("/run/netns/" + namespace); err == nil {
		if _, err := tell(ctx, "ip", "netns", "del", namespace); err != nil {
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil {
		return fmt.Errorf("remove the network: %w", failed)
	}
	return nil
}

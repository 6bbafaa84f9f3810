package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// runNetworkPolicy makes this node obey NetworkPolicies. The CNI plugins of the tests do not, and a policy that nobody
// enforces would pass every test.
func runNetworkPolicy() {
	if err := enforce(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "network-policy:", err)
		os.Exit(1)
	}
}

func enforce(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: network-policy KUBECONFIG NODE SERVICE-CIDR")
	}
	rest, err := clientcmd.BuildConfigFromFlags("", args[0])
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	config := options.NewKubeRouterConfig()
	config.HostnameOverride, config.ClusterIPCIDRs = args[1], []string{args[2]}
	config.EnableIPv4, config.RunFirewall = true, true

	stop := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(stop)
	factory.WaitForCacheSync(stop)

	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	c, err := netpol.NewNetworkPolicyController(client, config, pods, policies, namespaces, &sync.Mutex{}, tables, sets)
	if err != nil {
		return err
	}
	if _, err := pods.AddEventHandler(c.PodEventHandler); err != nil {
		return err
	}
	if _, err := namespaces.AddEventHandler(c.NamespaceEventHandler); err != nil {
		return err
	}
	if _, err := policies.AddEventHandler(c.NetworkPolicyEventHandler); err != nil {
		return err
	}

	beats := make(chan *healthcheck.ControllerHeartbeat, 8)
	go func() {
		for range beats {
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	go c.Run(beats, stop, &running)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	<-ended
	close(stop)
	running.Wait()
	return nil
}

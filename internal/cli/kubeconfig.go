package cli

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) kubeconfig() *cobra.Command {
	var server, namespace, out string
	var router bool
	c := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print a kubeconfig for kubectl and agent-sandbox's clients",
		Long: "Print a kubeconfig with which kubectl and the clients of agent-sandbox use this server as if it were a cluster. Its token\n" +
			"is your API key: keep the file to yourself. An existing file is not merged with; kubectl takes several at once in\n" +
			"KUBECONFIG, separated by colons.\n\n" +
			"With --router-url it prints instead the URL for clients that reach sandboxes directly, without a tunnel: the api_url of a\n" +
			"SandboxDirectConnectionConfig. It holds a secret, because such clients can carry no key.",
		Example: "  cove kubeconfig --out ~/.kube/cove\n  KUBECONFIG=~/.kube/cove kubectl get sandboxes,sandboxclaims -A\n  cove kubeconfig --router-url",
		Args:    exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			access, err := cl.Kubernetes(c.Context())
			if err != nil {
				return err
			}
			if router {
				return a.write(out, strings.TrimSuffix(a.server, "/")+access.RouterPath+"\n")
			}
			if server != "" {
				access.Server = server
			}
			text, err := kubeconfigText(*access, a.token, namespace)
			if err != nil {
				return err
			}
			return a.write(out, text)
		},
	}
	f := c.Flags()
	f.StringVar(&server, "server", "", "`URL` of the server's Kubernetes API as this machine reaches it; default: as the server says")
	f.StringVarP(&namespace, "namespace", "n", "default", "`name` of the namespace that commands use")
	f.StringVarP(&out, "out", "o", "-", "write this `file`, with mode 0600; - is standard output")
	f.BoolVar(&router, "router-url", false, "print the URL for clients without a tunnel instead")
	return c
}

// write puts a secret text where it is wanted. It makes the directory: few have ~/.kube before their
// first cluster.
func (a *invocation) write(file, text string) error {
	if file == "-" {
		_, err := fmt.Fprint(a.Out, text)
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := f.Chmod(0o600); err != nil { // of one that was there before
		return errors.Join(err, f.Close())
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// kubeconfigText is a kubeconfig with one cluster, one user and one context, all called cove. JSON is YAML: values are quoted
// as they must be.
func kubeconfigText(access client.KubernetesAccess, key, namespace string) (string, error) {
	quote := func(s string) string {
		b, err := json.Marshal(s)
		if err != nil {
			return `""` // text always has a JSON form
		}
		return string(b)
	}
	if access.Server == "" {
		return "", errors.New("the server does not say where its Kubernetes API is; give it with --server URL")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Config\nclusters:\n- name: cove\n  cluster:\n    server: %s\n", quote(access.Server))
	if access.CertificateAuthority != "" {
		fmt.Fprintf(&b, "    certificate-authority-data: %s\n", base64.StdEncoding.EncodeToString([]byte(access.CertificateAuthority)))
	}
	fmt.Fprintf(&b, "users:\n- name: cove\n  user:\n    token: %s\n", quote(key))
	fmt.Fprintf(&b, "contexts:\n- name: cove\n  context:\n    cluster: cove\n    user: cove\n    namespace: %s\ncurrent-context: cove\n", quote(namespace))
	return b.String(), nil
}

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	serverSpace  = "cove"           // where a deployed server is
	sandboxSpace = "cove-sandboxes" // where its sandboxes are
	// rendererVariable names the program that renders the chart: Helm's own library, which the project itself does not need.
	rendererVariable = "COVE_TEST_RENDER"
	// databaseURL is where a test makes itself a database.
	databaseURL = "postgres://cove@" + nodeAddress + ":5432/cove?sslmode=disable"
)

func deployServer(ctx context.Context, c *cluster, values []string) error {
	url, key, err := c.deploy(ctx, values...)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.out, "export COVE_URL=%q\nexport COVE_API_KEY=%q\n", url, key)
	return nil
}

func undeployServer(ctx context.Context, c *cluster, _ []string) error { return c.undeploy(ctx) }

// deploy installs Cove from its chart, with files of values beside those of every test, and returns when it serves.
func (c *cluster) deploy(ctx context.Context, values ...string) (url, key string, err error) {
	program := os.Getenv(rendererVariable)
	if program == "" {
		return "", "", fmt.Errorf("%s does not name the chart's renderer: build test/chart/render", rendererVariable)
	}
	args := []string{"-chart", filepath.Join(c.repo, "deploy/chart/cove"), "-values", filepath.Join(c.repo, "test/cluster/values.yaml")}
	for _, file := range values {
		args = append(args, "-values", file)
	}
	chart, err := tell(ctx, program, args...)
	if err != nil {
		return "", "", err
	}
	var b [20]byte
	_, _ = rand.Read(b[:]) // never fails
	key = "e2b_" + hex.EncodeToString(b[:])
	if _, err := c.kubectl(ctx, "create", "namespace", serverSpace); err != nil {
		return "", "", err // another deployment is not this one's to remove
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.whyNotServed(context.WithoutCancel(ctx)), c.undeploy(context.WithoutCancel(ctx)))
		}
	}()
	for _, args := range [][]string{
		{"create", "secret", "generic", "cove-admin", "-n", serverSpace, "--from-literal=admin-key=" + key},
		{"create", "secret", "generic", "cove-database", "-n", serverSpace, "--from-literal=url=" + databaseURL},
	} {
		if _, err := c.kubectl(ctx, args...); err != nil {
			return "", "", errors.New(strings.ReplaceAll(err.Error(), key, "KEY"))
		}
	}
	if err := c.apply(ctx, chart); err != nil {
		return "", "", err
	}
	if _, err := c.kubectl(ctx, "--request-timeout=2m", "rollout", "status", "-n", serverSpace, "deployment/cove", "--timeout=90s"); err != nil {
		return "", "", err
	}
	address, err := c.kubectl(ctx, "get", "service", "-n", serverSpace, "cove", "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return "", "", err
	}
	url = "http://" + net.JoinHostPort(strings.TrimSpace(address), "3000")
	// A node learns of a Service's Pods a moment after they are ready.
	return url, key, until(ctx, 30*time.Second, "the server behind its Service", func(ctx context.Context) (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", nil)
		if err != nil {
			return false, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false, err
		}
		return resp.StatusCode == http.StatusOK, resp.Body.Close()
	})
}

// whyNotServed is what a person would ask for first.
func (c *cluster) whyNotServed(ctx context.Context) error {
	var all []error
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"}, {"logs", "-n", serverSpace, "deployment/cove", "--all-pods", "--tail=60"},
		{"get", "events", "-n", serverSpace, "--sort-by=.lastTimestamp"}, {"get", "events", "-n", sandboxSpace, "--sort-by=.lastTimestamp"},
	} {
		out, err := c.kubectl(ctx, args...)
		all = append(all, fmt.Errorf("kubectl %s: %s", strings.Join(args, " "), out), err)
	}
	return errors.Join(all...)
}

// undeploy removes the server and its sandboxes, whatever is there of them.
func (c *cluster) undeploy(ctx context.Context) error {
	_, err := c.kubectl(ctx, "--request-timeout=2m", "delete", "namespace", serverSpace, sandboxSpace, "--ignore-not-found", "--timeout=100s")
	return err
}

// apply gives the cluster objects.
func (c *cluster) apply(ctx context.Context, text string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "kubectl"), "--kubeconfig", c.path("kubeconfig"), "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

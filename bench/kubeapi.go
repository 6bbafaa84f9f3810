package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// apiServer is the cluster's, asked as its administrator: what waits, and what was written.
type apiServer struct {
	url  string
	http *http.Client
}

// openAPI reads what the harness of the tests left in the cluster's directory.
func openAPI(dir string) (*apiServer, error) {
	if dir == "" {
		return nil, errors.New("COVE_TEST_CLUSTER is not set")
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "pki/admin.crt"), filepath.Join(dir, "pki/admin.key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(dir, "pki/ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	config, err := os.ReadFile(filepath.Join(dir, "kubeconfig"))
	if err != nil {
		return nil, err
	}
	server := regexp.MustCompile(`"?server"?: ?"?(https://[^"\s]+)`).FindSubmatch(config)
	if server == nil {
		return nil, errors.New("the kubeconfig names no server")
	}
	return &apiServer{url: string(server[1]), http: &http.Client{
		Timeout:   30 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, MinVersion: tls.VersionTLS12}},
	}}, nil
}

func (a *apiServer) do(ctx context.Context, method, path string, body any) ([]byte, error) {
	var sent io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		sent = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, a.url+path, sent)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 64<<20))
	if err == nil && response.StatusCode >= http.StatusBadRequest {
		err = fmt.Errorf("%s %s: %s: %.300s", method, path, response.Status, text)
	}
	return text, err
}

func (a *apiServer) makeNamespace(ctx context.Context, name string) error {
	_, err := a.do(ctx, http.MethodPost, "/api/v1/namespaces", map[string]any{
		"metadata": map[string]any{"name": name, "labels": map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}},
	})
	return err
}

func (a *apiServer) removeNamespace(ctx context.Context, name string) error {
	_, err := a.do(ctx, http.MethodDelete, "/api/v1/namespaces/"+name, nil)
	return err
}

// pods counts those that wait for a sandbox, and those that are anything else.
func (a *apiServer) pods(ctx context.Context, namespace string) (ready, other int, err error) {
	text, err := a.do(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/pods", nil)
	if err != nil {
		return 0, 0, err
	}
	var list struct {
		Items []struct {
			Metadata struct {
				Labels            map[string]string
				DeletionTimestamp string
			}
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return 0, 0, err
	}
	for _, pod := range list.Items {
		other++
		if pod.Metadata.Labels["cove.dev/state"] != "idle" || pod.Metadata.DeletionTimestamp != "" {
			continue
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == "Ready" && c.Status == "True" {
				ready, other = ready+1, other-1
			}
		}
	}
	return ready, other, nil
}

// writes is how often something was written, by verb and resource.
type writes map[string]float64

var requestTotal = regexp.MustCompile(`^apiserver_request_total\{(.*)\} (\S+)$`)

// writes reads the API server's own count.
func (a *apiServer) writes(ctx context.Context) (writes, error) {
	text, err := a.do(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		return nil, err
	}
	found := writes{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m := requestTotal.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		labels := map[string]string{}
		for pair := range strings.SplitSeq(m[1], ",") {
			name, value, _ := strings.Cut(pair, "=")
			labels[name] = strings.Trim(value, `"`)
		}
		switch labels["verb"] {
		case "POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION":
		default:
			continue
		}
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, err
		}
		found[strings.TrimSuffix(labels["verb"]+" "+labels["resource"]+"/"+labels["subresource"], "/")] += n
	}
	return found, lines.Err()
}

func (w writes) minus(before writes) writes {
	left := writes{}
	for name, n := range w {
		if n > before[name] {
			left[name] = n - before[name]
		}
	}
	return left
}

func (w writes) plus(other writes) writes {
	sum := writes{}
	for _, part := range []writes{w, other} {
		for name, n := range part {
			sum[name] += n
		}
	}
	return sum
}

// claims are what a claim itself writes: nobody else on this cluster patches Pods, whose status is a resource of its own, or makes policies.
func (w writes) claims() float64 {
	return w["PATCH pods"] + w["POST networkpolicies"] + w["PUT networkpolicies"]
}

// ours are all that Cove writes: the Pod that takes the claimed one's place, and the end of it. Of two deletions the second is the node's.
func (w writes) ours() float64 { return w.claims() + w["POST pods"] + w["DELETE pods"]/2 }

// total is what everybody wrote, but what is written whether anybody wants a sandbox or not.
func (w writes) total() (n float64) {
	for name, count := range w {
		if !strings.HasSuffix(name, " leases") && !strings.HasSuffix(name, " nodes/status") && !strings.HasSuffix(name, "accessreviews") {
			n += count
		}
	}
	return n
}

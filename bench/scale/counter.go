package main

import (
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
)

// counter counts what one server says to the API server and hears from it.
type counter struct {
	watched atomic.Int64 // bytes of watches

	mu    sync.Mutex
	calls map[string]int // by verb and resource, those that lost a race apart
}

func newCounter() *counter { return &counter{calls: map[string]int{}} }

// wrap puts the counter between a client and its transport.
func (c *counter) wrap(next http.RoundTripper) http.RoundTripper {
	return transport(func(r *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(r)
		if err != nil {
			return nil, err
		}
		if r.URL.Query().Get("watch") != "" {
			response.Body = &metered{response.Body, &c.watched}
			return response, nil
		}
		name := r.Method + " " + resourceOf(r.URL.Path)
		if code := response.StatusCode; code == http.StatusConflict || code == http.StatusUnprocessableEntity {
			name += " " + lost
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls[name]++
		return response, nil
	})
}

// lost marks a write that somebody else was faster with.
const lost = "lost"

// take returns what was counted since the last time.
func (c *counter) take() (calls map[string]int, watched int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls = maps.Clone(c.calls)
	clear(c.calls)
	return calls, c.watched.Swap(0)
}

// resourceOf finds "pods" in …/namespaces/NAME/pods/NAME, and "pods/status" in what follows.
func resourceOf(path string) string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i, part := range parts {
		if part == "namespaces" && len(parts) > i+2 {
			if rest := parts[i+2:]; len(rest) > 2 {
				return rest[0] + "/" + rest[2]
			}
			return parts[i+2]
		}
	}
	return path
}

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// metered counts what is read.
type metered struct {
	io.ReadCloser
	n *atomic.Int64
}

func (m *metered) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.n.Add(int64(n))
	return n, err
}

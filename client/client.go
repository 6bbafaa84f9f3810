package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Prefix is where the API lives on a server.
const Prefix = "/cove/v1"

// Client speaks to one server with one key. It is safe for concurrent use.
type Client struct {
	base string
	key  string
	http *http.Client
}

// Option changes a Client as it is made.
type Option func(*Client)

// WithHTTPClient uses an HTTP client of yours, for proxies, TLS or tracing.
func WithHTTPClient(h *http.Client) Option { return func(c *Client) { c.http = h } }

// New makes a client for the server at base, such as http://127.0.0.1:8080.
func New(base, key string, options ...Option) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("server URL %q: want http://HOST:PORT or https://HOST", base)
	}
	c := &Client{base: strings.TrimSuffix(base, "/") + Prefix, key: key}
	for _, o := range options {
		o(c)
	}
	if c.http == nil {
		c.http = &http.Client{Transport: transport()}
	}
	return c, nil
}

// transport keeps enough idle connections for many sandboxes at once and never inflates a file that merely looks
// compressed.
func transport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConnsPerHost = 128
	t.MaxIdleConns = 512
	t.DisableCompression = true
	t.WriteBufferSize = 128 << 10
	t.ReadBufferSize = 64 << 10
	return t
}

// FromEnv makes a client from COVE_URL and COVE_API_KEY.
func FromEnv(options ...Option) (*Client, error) {
	base := os.Getenv("COVE_URL")
	if base == "" {
		return nil, errors.New("COVE_URL is not set: start a server with `cove serve` and export the URL it prints")
	}
	return New(base, os.Getenv("COVE_API_KEY"), options...)
}

// Close lets go of idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Create makes a sandbox and returns when it takes code. With a Key it may be one that lives already.
func (c *Client) Create(ctx context.Context, req CreateRequest) (*Sandbox, error) {
	sb := &Sandbox{c: c}
	if err := c.do(ctx, http.MethodPost, "/sandboxes", nil, req, &sb.SandboxInfo); err != nil {
		return nil, err
	}
	return sb, nil
}

// Sandbox is a handle on a sandbox by its id; it asks the server nothing.
func (c *Client) Sandbox(id string) *Sandbox {
	return &Sandbox{SandboxInfo: SandboxInfo{ID: id}, c: c}
}

// Get asks for one sandbox, living or ended.
func (c *Client) Get(ctx context.Context, id string) (*Sandbox, error) {
	sb := c.Sandbox(id)
	if err := sb.Refresh(ctx); err != nil {
		return nil, err
	}
	return sb, nil
}

// ListRequest filters sandboxes; what is empty does not filter.
type ListRequest struct {
	States   []string
	Template string
	Key      string
	Metadata map[string]string
	Limit    int // sandboxes per page
	Cursor   string
}

func (l ListRequest) query() url.Values {
	q := url.Values{}
	for _, s := range l.States {
		q.Add("state", s)
	}
	for k, v := range l.Metadata {
		q.Set("metadata."+k, v)
	}
	set(q, "template", l.Template)
	set(q, "key", l.Key)
	set(q, "cursor", l.Cursor)
	if l.Limit > 0 {
		q.Set("limit", strconv.Itoa(l.Limit))
	}
	return q
}

// List yields sandboxes, fetching pages as it goes.
func (c *Client) List(ctx context.Context, req ListRequest) iter.Seq2[SandboxInfo, error] {
	return func(yield func(SandboxInfo, error) bool) {
		for {
			var page SandboxList
			if err := c.do(ctx, http.MethodGet, "/sandboxes", req.query(), nil, &page); err != nil {
				yield(SandboxInfo{}, err)
				return
			}
			for _, sb := range page.Sandboxes {
				if !yield(sb, nil) {
					return
				}
			}
			if page.Cursor == "" {
				return
			}
			req.Cursor = page.Cursor
		}
	}
}

// Templates lists what a sandbox can start from.
func (c *Client) Templates(ctx context.Context) ([]TemplateInfo, error) {
	var list TemplateList
	err := c.do(ctx, http.MethodGet, "/templates", nil, nil, &list)
	return list.Templates, err
}

// Template tells about one template.
func (c *Client) Template(ctx context.Context, name string) (*TemplateInfo, error) {
	var t TemplateInfo
	if err := c.do(ctx, http.MethodGet, "/templates/"+url.PathEscape(name), nil, nil, &t); err != nil {
		return nil, err
	}
	return &t, nil
}

// RemoveTemplate removes a template that a snapshot of your tenant made. Sandboxes that run from it go on.
func (c *Client) RemoveTemplate(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/templates/"+url.PathEscape(name), nil, nil, nil)
}

// EventsRequest picks lifecycle events.
type EventsRequest struct {
	Sandbox string // only of this sandbox
	After   int64  // only what came after this Seq
	Follow  bool   // go on with what happens next
}

// Events yields what happened to sandboxes.
func (c *Client) Events(ctx context.Context, req EventsRequest) iter.Seq2[LifecycleEvent, error] {
	q := url.Values{}
	set(q, "sandbox", req.Sandbox)
	if req.After > 0 {
		q.Set("after", strconv.FormatInt(req.After, 10))
	}
	if req.Follow {
		q.Set("follow", "true")
	}
	return func(yield func(LifecycleEvent, error) bool) {
		resp, err := c.send(ctx, http.MethodGet, "/events", q, nil, ndjson)
		if err != nil {
			yield(LifecycleEvent{}, err)
			return
		}
		defer resp.Body.Close()
		dec := json.NewDecoder(resp.Body)
		for {
			var e LifecycleEvent
			if err := dec.Decode(&e); err == io.EOF {
				return
			} else if err != nil {
				yield(e, fmt.Errorf("event stream: %w", err))
				return
			}
			if e.Fault != nil {
				yield(e, &Error{Kind: e.Fault.Kind, Message: e.Fault.Message})
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

// CreateKey makes an API key; needs an admin key.
func (c *Client) CreateKey(ctx context.Context, req KeyRequest) (NewKey, error) {
	var k NewKey
	err := c.do(ctx, http.MethodPost, "/keys", nil, req, &k)
	return k, err
}

// Keys lists a tenant's API keys; empty is your own tenant.
func (c *Client) Keys(ctx context.Context, tenant string) ([]Key, error) {
	q := url.Values{}
	set(q, "tenant", tenant)
	var list KeyList
	err := c.do(ctx, http.MethodGet, "/keys", q, nil, &list)
	return list.Keys, err
}

// RevokeKey ends an API key; empty tenant is your own.
func (c *Client) RevokeKey(ctx context.Context, tenant, id string) error {
	q := url.Values{}
	set(q, "tenant", tenant)
	return c.do(ctx, http.MethodDelete, "/keys/"+url.PathEscape(id), q, nil, nil)
}

const (
	applicationJSON = "application/json"
	ndjson          = "application/x-ndjson"
)

// do sends a JSON request and decodes a JSON answer; nil means there is none.
func (c *Client) do(ctx context.Context, method, path string, q url.Values, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	resp, err := c.send(ctx, method, path, q, body, applicationJSON)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("decode answer of %s %s: %w", method, path, err)
	}
	return nil
}

// upload sends bytes of any length and decodes the answer.
func (c *Client) upload(ctx context.Context, method, path string, q url.Values, content io.Reader, out any) error {
	req, err := c.request(ctx, method, path, q, content)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := c.receive(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("decode answer of %s %s: %w", method, path, err)
	}
	return nil
}

// send returns a successful answer with its body open, or the server's explanation.
func (c *Client) send(ctx context.Context, method, path string, q url.Values, body io.Reader, accept string) (*http.Response, error) {
	req, err := c.request(ctx, method, path, q, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	return c.receive(req)
}

func (c *Client) request(ctx context.Context, method, path string, q url.Values, body io.Reader) (*http.Request, error) {
	target := c.base + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, err
	}
	if c.key != "" {
		req.Header.Set("X-API-Key", c.key)
	}
	if _, isJSON := body.(*bytes.Reader); isJSON {
		req.Header.Set("Content-Type", applicationJSON)
	}
	return req, nil
}

func (c *Client) receive(req *http.Request) (*http.Response, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the server: %w", err)
	}
	if resp.StatusCode < 400 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, explain(resp)
}

// explain reads the server's own words, or makes do with the status when something else answered.
func explain(resp *http.Response) error {
	e := &Error{Kind: Internal, Status: resp.StatusCode, RequestID: resp.Header.Get("X-Request-Id")}
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var body ErrorBody
	if json.Unmarshal(raw, &body) == nil && body.Error.Kind != "" {
		e.Kind, e.Message = body.Error.Kind, body.Error.Message
		return e
	}
	e.Message = "the server answered " + resp.Status
	return e
}

func set(q url.Values, name, value string) {
	if value != "" {
		q.Set(name, value)
	}
}

// seconds is a duration as the API writes it.
func seconds(d time.Duration) float64 { return d.Seconds() }

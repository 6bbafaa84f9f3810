package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/covehq/cove/internal/fault"
)

// What a registry may send us at most that is read whole. The distribution specification asks registries to take manifests of 4 MiB.
const (
	maxManifest = 4 << 20
	maxConfig   = 4 << 20
	maxComplain = 64 << 10
)

// accepted are the kinds of manifests that are asked for. One of the first schema has to be offered to be refused in plain words.
var accepted = strings.Join([]string{
	string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
	string(types.DockerManifestSchema1Signed), string(types.DockerManifestSchema1),
}, ", ")

// source is one place that has an image: its registry, or a mirror of that.
type source struct {
	host       string
	repository string
	creds      credentials
	door       http.RoundTripper

	mu     sync.Mutex
	client *http.Client // nil: not asked yet
}

// sources are the places that an image is asked for at, in that order: mirrors, then its own registry. What came with the
// request is for the registry that it names and for no mirror.
func (s *Service) sources(ctx context.Context, tenant string, r reference, creds credentials) ([]*source, error) {
	var all []*source
	for registry, mirrors := range s.cfg.Mirrors {
		if show, err := parseRegistry(registry); err != nil || show != r.registry {
			continue
		}
		for _, text := range mirrors {
			m, err := parseMirror(text)
			if err != nil {
				return nil, err
			}
			c, err := s.credentialsFor(ctx, tenant, showRegistry(m.host))
			if err != nil {
				return nil, err
			}
			all = append(all, s.source(tenant, m.host, strings.TrimPrefix(m.prefix+"/"+r.repository, "/"), c))
		}
	}
	if creds == (credentials{}) {
		var err error
		if creds, err = s.credentialsFor(ctx, tenant, r.registry); err != nil {
			return nil, err
		}
	}
	return append(all, s.source(tenant, hostOf(r.registry), r.repository, creds)), nil
}

func (s *Service) source(tenant, host, repository string, c credentials) *source {
	return &source{host: host, repository: repository, creds: c, door: door{s.network, tenant == s.cfg.Operator && tenant != "", host}}
}

// open asks a registry how it wants to be spoken to and gets a token where it wants one.
func (o *source) open(ctx context.Context, plain bool) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.client != nil {
		return nil
	}
	options := []name.Option{name.WeakValidation}
	if plain {
		options = append(options, name.Insecure)
	}
	registry, err := name.NewRegistry(o.host, options...)
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "%q is not a registry", o.host)
	}
	var scopes []string
	if o.repository != "" {
		scopes = []string{registry.Repo(o.repository).Scope(transport.PullScope)}
	}
	t, err := transport.NewWithContext(ctx, registry, o.creds.authenticator(), o.door, scopes)
	if err != nil {
		return tame(err)
	}
	o.client = &http.Client{Transport: t, CheckRedirect: follow}
	return nil
}

// tame replaces failures of the handshake that could quote what was said in it.
func tame(err error) error {
	var (
		refused *transport.Error
		at      *url.Error
	)
	if errors.As(err, &refused) || errors.As(err, &at) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return errHandshake
}

var errHandshake = errors.New("what the registry says about authentication is not understood or not trusted")

// get sends one request. Every answer but those with one of the given statuses is an error.
func (o *source) get(ctx context.Context, method, path string, header http.Header, statuses ...int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "https://"+o.host+path, nil)
	if err != nil {
		return nil, err
	}
	for key, values := range header {
		req.Header[key] = values
	}
	answer, err := o.client.Do(req)
	if err != nil {
		return nil, err
	}
	for _, s := range statuses {
		if answer.StatusCode == s {
			return answer, nil
		}
	}
	defer answer.Body.Close()
	return nil, complaint(answer)
}

// statusError is a registry's refusal, without its words: it could repeat what it was sent.
type statusError struct {
	host   string
	status int
	code   string // as the distribution specification has them; empty: it gave none
}

func (e *statusError) Error() string {
	return strings.TrimSpace(fmt.Sprintf("%s answered %d %s", e.host, e.status, e.code))
}

func complaint(answer *http.Response) error {
	e := &statusError{host: answer.Request.URL.Host, status: answer.StatusCode}
	var body struct {
		Errors []struct {
			Code string `json:"code"`
		} `json:"errors"`
	}
	text, _ := io.ReadAll(io.LimitReader(answer.Body, maxComplain))
	if json.Unmarshal(text, &body) == nil && len(body.Errors) > 0 && isCode(body.Errors[0].Code) {
		e.code = body.Errors[0].Code
	}
	return e
}

// isCode keeps whatever else a registry writes into this place out of logs.
func isCode(s string) bool {
	return s != "" && len(s) <= 40 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == ""
}

// manifest is a manifest or an index as the registry has it, checked against its digest if that is known.
func (o *source) manifest(ctx context.Context, identifier string) (document, error) {
	answer, err := o.get(ctx, http.MethodGet, "/v2/"+o.repository+"/manifests/"+identifier, http.Header{"Accept": {accepted}}, http.StatusOK)
	if err != nil {
		return document{}, err
	}
	defer answer.Body.Close()
	raw, err := readAll(answer.Body, maxManifest)
	if err != nil {
		return document{}, err
	}
	d := document{raw: raw, mediaType: types.MediaType(answer.Header.Get("Content-Type")), digest: digestOf(raw)}
	if strings.HasPrefix(identifier, "sha256:") && d.digest != identifier {
		return document{}, &digestError{what: "manifest", want: identifier, got: d.digest}
	}
	return d, nil
}

// head is the digest of a manifest, without the manifest: registries count pulls by what is got, not by this. Empty: it
// does not say.
func (o *source) head(ctx context.Context, identifier string) (string, error) {
	answer, err := o.get(ctx, http.MethodHead, "/v2/"+o.repository+"/manifests/"+identifier, http.Header{"Accept": {accepted}}, http.StatusOK)
	if err != nil {
		return "", err
	}
	answer.Body.Close()
	return answer.Header.Get("Docker-Content-Digest"), nil
}

// small is a blob that is read whole.
func (o *source) small(ctx context.Context, digest string, size int64) ([]byte, error) {
	if size < 0 || size > maxConfig {
		return nil, errTooLong
	}
	answer, err := o.get(ctx, http.MethodGet, "/v2/"+o.repository+"/blobs/"+digest, nil, http.StatusOK)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	raw, err := readAll(answer.Body, size)
	if err != nil {
		return nil, err
	}
	if got := digestOf(raw); got != digest {
		return nil, &digestError{what: "configuration", want: digest, got: got}
	}
	return raw, nil
}

// tryLogin asks a registry whether it takes credentials.
func (s *Service) tryLogin(ctx context.Context, tenant, registry string, c credentials) error {
	o := s.source(tenant, hostOf(registry), "", c)
	err := o.open(ctx, s.network.mayPlain(o.host))
	if err == nil {
		var answer *http.Response
		if answer, err = o.get(ctx, http.MethodGet, "/v2/", nil, http.StatusOK); err == nil {
			answer.Body.Close()
		}
	}
	if status(err) == http.StatusUnauthorized || status(err) == http.StatusForbidden {
		return fault.Wrap(fault.Denied, plainCause(err), "%s does not take this username and password", registry)
	}
	return explain(ctx, registry, o, err)
}

var errTooLong = errors.New("the registry sent more than it may")

// digestError is content that is not what its name says.
type digestError struct{ what, want, got string }

func (e *digestError) Error() string {
	return fmt.Sprintf("%s: want %s, got %s", e.what, e.want, e.got)
}

func readAll(r io.Reader, most int64) ([]byte, error) {
	var b bytes.Buffer
	n, err := b.ReadFrom(io.LimitReader(r, most+1))
	if err == nil && n > most {
		err = errTooLong
	}
	return b.Bytes(), err
}

func digestOf(raw []byte) string {
	sum := sha256.Sum256(raw)
	return "sha256:" + hex.EncodeToString(sum[:])
}

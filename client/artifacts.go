package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// ArtifactsRequest chooses artifacts; what is empty does not choose.
type ArtifactsRequest struct {
	Session string // key of a session
	Run     string
	SHA256  string
	Limit   int // how many to ask for at once
}

// Artifacts yields artifacts, newest first, fetching pages as it goes.
func (c *Client) Artifacts(ctx context.Context, req ArtifactsRequest) iter.Seq2[Artifact, error] {
	return func(yield func(Artifact, error) bool) {
		q := url.Values{}
		set(q, "session", req.Session)
		set(q, "run", req.Run)
		set(q, "sha256", req.SHA256)
		if req.Limit > 0 {
			q.Set("limit", strconv.Itoa(req.Limit))
		}
		for {
			var page ArtifactList
			if err := c.do(ctx, http.MethodGet, "/artifacts", q, nil, &page); err != nil {
				yield(Artifact{}, err)
				return
			}
			for _, a := range page.Artifacts {
				if !yield(a, nil) {
					return
				}
			}
			if page.Cursor == "" {
				return
			}
			q.Set("cursor", page.Cursor)
		}
	}
}

func artifactPath(id, more string) string { return "/artifacts/" + url.PathEscape(id) + more }

// Artifact tells about one.
func (c *Client) Artifact(ctx context.Context, id string) (*Artifact, error) {
	var a Artifact
	if err := c.do(ctx, http.MethodGet, artifactPath(id, ""), nil, nil, &a); err != nil {
		return nil, err
	}
	return &a, nil
}

// ReadArtifact reads one. The reader ends with an error rather than with other bytes than those that were kept.
func (c *Client) ReadArtifact(ctx context.Context, id string) (*Artifact, io.ReadCloser, error) {
	a, err := c.Artifact(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	body, err := c.artifactContent(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	return a, &verifier{ReadCloser: body, sum: sha256.New(), want: a.SHA256}, nil
}

func (c *Client) artifactContent(ctx context.Context, id string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, artifactPath(id, "/content"), nil, nil, "*/*")
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// verifier checks what was read when it ends.
type verifier struct {
	io.ReadCloser
	sum  hash.Hash
	want string
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.ReadCloser.Read(p)
	v.sum.Write(p[:n])
	if !errors.Is(err, io.EOF) {
		return n, err
	}
	if got := hex.EncodeToString(v.sum.Sum(nil)); got != v.want {
		return n, fmt.Errorf("what came is not what was kept: its SHA-256 is %s, not %s", got, v.want)
	}
	return n, err
}

// ArtifactLineage tells which cell made one, and from what.
func (c *Client) ArtifactLineage(ctx context.Context, id string) (*ArtifactLineage, error) {
	var l ArtifactLineage
	if err := c.do(ctx, http.MethodGet, artifactPath(id, "/lineage"), nil, nil, &l); err != nil {
		return nil, err
	}
	return &l, nil
}

// LinkArtifact makes a link that needs no key and holds for so long; zero is the server's default.
func (c *Client) LinkArtifact(ctx context.Context, id string, ttl time.Duration) (*Link, error) {
	var l Link
	if err := c.do(ctx, http.MethodPost, artifactPath(id, "/link"), nil, LinkRequest{TTLSeconds: ttl.Seconds()}, &l); err != nil {
		return nil, err
	}
	return &l, nil
}

// RemoveArtifact removes one.
func (c *Client) RemoveArtifact(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, artifactPath(id, ""), nil, nil, nil)
}

// RotateLinkKey signs links with a new key; with revoke, those signed before end at once. It needs an admin key.
func (c *Client) RotateLinkKey(ctx context.Context, revoke bool) error {
	q := url.Values{}
	if revoke {
		q.Set("revoke", "true")
	}
	return c.do(ctx, http.MethodPost, "/artifact-keys", q, nil, nil)
}

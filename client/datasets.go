package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
)

func datasetsPath(key string) string { return "/sessions/" + url.PathEscape(key) + "/datasets" }

// Datasets are those of a session.
func (c *Client) Datasets(ctx context.Context, key string) ([]Dataset, error) {
	var out DatasetList
	if err := c.do(ctx, http.MethodGet, datasetsPath(key), nil, nil, &out); err != nil {
		return nil, err
	}
	return out.Datasets, nil
}

// StageDataset sends a dataset of any size into a session. File is its name in /session/data; empty is one made of the id.
func (c *Client) StageDataset(ctx context.Context, key, id, file string, content io.Reader) (*Dataset, error) {
	q := url.Values{}
	set(q, "file", file)
	var out Dataset
	if err := c.upload(ctx, http.MethodPut, datasetsPath(key)+"/"+url.PathEscape(id), q, content, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// MarkDataset says what became of a dataset without sending it, or stages content that is on the server.
func (c *Client) MarkDataset(ctx context.Context, key, id string, req DatasetRequest) (*Dataset, error) {
	var out Dataset
	if err := c.do(ctx, http.MethodPost, datasetsPath(key)+"/"+url.PathEscape(id), nil, req, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// RemoveDataset takes a dataset out of a session.
func (c *Client) RemoveDataset(ctx context.Context, key, id string) error {
	return c.do(ctx, http.MethodDelete, datasetsPath(key)+"/"+url.PathEscape(id), nil, nil, nil)
}

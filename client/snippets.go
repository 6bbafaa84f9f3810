package client

import (
	"context"
	"net/http"
)

// Snippet runs Python code in a fresh process and returns when it has ended. An end without success is no error.
func (c *Client) Snippet(ctx context.Context, req SnippetRequest) (*SnippetResult, error) {
	var out SnippetResult
	if err := c.do(ctx, http.MethodPost, "/snippets", nil, req, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

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
	"strconv"
)

func sessionPath(key, more string) string { return "/sessions/" + url.PathEscape(key) + more }

// OpenSession returns a session with a living sandbox: the one it has, or a new one.
func (c *Client) OpenSession(ctx context.Context, key string, req SessionRequest) (*SessionInfo, error) {
	return c.session(ctx, http.MethodPut, sessionPath(key, ""), req)
}

// GetSession tells about a session, also when its sandbox is gone.
func (c *Client) GetSession(ctx context.Context, key string) (*SessionInfo, error) {
	return c.session(ctx, http.MethodGet, sessionPath(key, ""), nil)
}

// StopSession ends a session's sandbox; the session stays.
func (c *Client) StopSession(ctx context.Context, key string) (*SessionInfo, error) {
	return c.session(ctx, http.MethodPost, sessionPath(key, "/stop"), nil)
}

// RestoreSession puts a session back to a checkpoint.
func (c *Client) RestoreSession(ctx context.Context, key string, req RestoreRequest) (*SessionInfo, error) {
	return c.session(ctx, http.MethodPost, sessionPath(key, "/restore"), req)
}

func (c *Client) session(ctx context.Context, method, path string, in any) (*SessionInfo, error) {
	var s SessionInfo
	if err := c.do(ctx, method, path, nil, in, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// RemoveSession ends a session and removes its log and its files. Artifacts stay.
func (c *Client) RemoveSession(ctx context.Context, key string) error {
	return c.do(ctx, http.MethodDelete, sessionPath(key, ""), nil, nil, nil)
}

// SessionsRequest filters sessions; what is empty does not filter.
type SessionsRequest struct {
	States []string
	Limit  int // sessions per page
	Cursor string
}

// Sessions yields your sessions, those used last first, fetching pages as it goes.
func (c *Client) Sessions(ctx context.Context, req SessionsRequest) iter.Seq2[SessionInfo, error] {
	return func(yield func(SessionInfo, error) bool) {
		q := url.Values{"state": req.States}
		if req.Limit > 0 {
			q.Set("limit", strconv.Itoa(req.Limit))
		}
		for cursor := req.Cursor; ; {
			set(q, "cursor", cursor)
			var page SessionList
			if err := c.do(ctx, http.MethodGet, "/sessions", q, nil, &page); err != nil {
				yield(SessionInfo{}, err)
				return
			}
			for _, s := range page.Sessions {
				if !yield(s, nil) {
					return
				}
			}
			if cursor = page.Cursor; cursor == "" {
				return
			}
		}
	}
}

// RunInSession runs a cell and collects all that it tells. With an idempotency key a second one runs nothing: it is told what
// the first was.
func (c *Client) RunInSession(ctx context.Context, key string, req SessionRunRequest, idempotencyKey string) (*SessionOutput, error) {
	resp, err := c.sendRun(ctx, key, req, idempotencyKey, applicationJSON)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var out SessionOutput
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		return nil, fmt.Errorf("decode the answer of a run: %w", err)
	}
	return &out, nil
}

// StreamInSession runs a cell and yields what it tells as it happens.
func (c *Client) StreamInSession(ctx context.Context, key string, req SessionRunRequest, idempotencyKey string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		resp, err := c.sendRun(ctx, key, req, idempotencyKey, ndjson)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer resp.Body.Close()
		decodeEvents(resp.Body, yield)
	}
}

func (c *Client) sendRun(ctx context.Context, key string, in SessionRunRequest, idempotencyKey, accept string) (*http.Response, error) {
	body, err := json.Marshal(in)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	req, err := c.request(ctx, http.MethodPost, sessionPath(key, "/run"), nil, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	if idempotencyKey != "" {
		req.Header.Set("Idempotency-Key", idempotencyKey)
	}
	return c.receive(req)
}

// KeepFile keeps one file of a session's sandbox as an artifact.
func (c *Client) KeepFile(ctx context.Context, key string, req KeepRequest) (*Artifact, error) {
	var kept Artifact
	if err := c.do(ctx, http.MethodPost, sessionPath(key, "/keep"), nil, req, &kept); err != nil {
		return nil, err
	}
	return &kept, nil
}

// SessionLogRequest chooses lines of a session's log.
type SessionLogRequest struct {
	After  int64 // only lines with a higher Seq
	Last   int   // only so many of the newest; zero: all
	Follow bool  // go on with what happens next
}

// SessionLog yields what happened in a session, oldest first.
func (c *Client) SessionLog(ctx context.Context, key string, req SessionLogRequest) iter.Seq2[SessionLogLine, error] {
	q := url.Values{}
	if req.After > 0 {
		q.Set("after", strconv.FormatInt(req.After, 10))
	}
	if req.Last > 0 {
		q.Set("last", strconv.Itoa(req.Last))
	}
	if req.Follow {
		q.Set("follow", "true")
	}
	return func(yield func(SessionLogLine, error) bool) {
		resp, err := c.send(ctx, http.MethodGet, sessionPath(key, "/log"), q, nil, ndjson)
		if err != nil {
			yield(SessionLogLine{}, err)
			return
		}
		defer resp.Body.Close()
		decodeLog(resp.Body, yield)
	}
}

func decodeLog(r io.Reader, yield func(SessionLogLine, error) bool) {
	dec := json.NewDecoder(r)
	for {
		var line struct {
			SessionLogLine
			Fault *Fault `json:"fault"`
		}
		switch err := dec.Decode(&line); {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			yield(SessionLogLine{}, fmt.Errorf("log of a session: %w", err))
			return
		case line.Fault != nil:
			yield(SessionLogLine{}, &Error{Kind: line.Fault.Kind, Message: line.Fault.Message})
			return
		}
		if !yield(line.SessionLogLine, nil) {
			return
		}
	}
}

// SessionState tells the kernel's variables and modules after the last cell.
func (c *Client) SessionState(ctx context.Context, key string) (*SessionState, error) {
	var s SessionState
	if err := c.do(ctx, http.MethodGet, sessionPath(key, "/state"), nil, nil, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// Checkpoint keeps a session as it is: files and memory.
func (c *Client) Checkpoint(ctx context.Context, key string, req CheckpointRequest) (*Checkpoint, error) {
	var made Checkpoint
	if err := c.do(ctx, http.MethodPost, sessionPath(key, "/checkpoints"), nil, req, &made); err != nil {
		return nil, err
	}
	return &made, nil
}

// Checkpoints lists a session's checkpoints, oldest first.
func (c *Client) Checkpoints(ctx context.Context, key string) ([]Checkpoint, error) {
	var list CheckpointList
	err := c.do(ctx, http.MethodGet, sessionPath(key, "/checkpoints"), nil, nil, &list)
	return list.Checkpoints, err
}

// RemoveCheckpoint removes a checkpoint.
func (c *Client) RemoveCheckpoint(ctx context.Context, key, id string) error {
	return c.do(ctx, http.MethodDelete, sessionPath(key, "/checkpoints/"+url.PathEscape(id)), nil, nil, nil)
}

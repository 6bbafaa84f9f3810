package client

import (
	"bytes"
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
)

// Files reaches the files of one sandbox. A relative path starts at the user's home.
type Files struct {
	s    *Sandbox
	user string
}

// Files as the sandbox's own user.
func (s *Sandbox) Files() Files { return Files{s: s} }

// As is the same files as another user of the sandbox.
func (f Files) As(user string) Files { return Files{s: f.s, user: user} }

func (f Files) query(path string) url.Values {
	q := url.Values{"path": {path}}
	set(q, "user", f.user)
	return q
}

// Open streams a file from the sandbox; the caller closes it.
func (f Files) Open(ctx context.Context, path string) (io.ReadCloser, error) {
	return f.OpenRange(ctx, path, 0, 0)
}

// OpenRange streams a part of a file; length 0 is up to its end.
func (f Files) OpenRange(ctx context.Context, path string, offset, length int64) (io.ReadCloser, error) {
	q := f.query(path)
	if offset > 0 {
		q.Set("offset", strconv.FormatInt(offset, 10))
	}
	if length > 0 {
		q.Set("length", strconv.FormatInt(length, 10))
	}
	resp, err := f.s.c.send(ctx, http.MethodGet, f.s.path("files"), q, nil, "*/*")
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Read is a whole file in memory; Open is for large ones.
func (f Files) Read(ctx context.Context, path string) ([]byte, error) {
	r, err := f.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// WriteOptions change how a file is written.
type WriteOptions struct {
	Mode   uint32 // 0 keeps an existing file's, else 0644
	Append bool
}

// Write streams a file into the sandbox: parents are made, and the content appears at once or not at all.
func (f Files) Write(ctx context.Context, path string, content io.Reader, options WriteOptions) (Entry, error) {
	q := f.query(path)
	if options.Mode != 0 {
		q.Set("mode", "0"+strconv.FormatUint(uint64(options.Mode), 8))
	}
	if options.Append {
		q.Set("append", "true")
	}
	var e Entry
	if err := f.s.c.upload(ctx, http.MethodPut, f.s.path("files"), q, content, &e); err != nil {
		return Entry{}, err
	}
	return e, nil
}

// WriteBytes writes a small file.
func (f Files) WriteBytes(ctx context.Context, path string, content []byte) (Entry, error) {
	return f.Write(ctx, path, bytes.NewReader(content), WriteOptions{})
}

// Stat tells about one path.
func (f Files) Stat(ctx context.Context, path string) (Entry, error) {
	var e Entry
	err := f.s.c.do(ctx, http.MethodGet, f.s.path("files", "stat"), f.query(path), nil, &e)
	return e, err
}

// List tells about the entries of a directory, and of those below it down to depth; 1 is its own.
func (f Files) List(ctx context.Context, path string, depth int) ([]Entry, error) {
	q := f.query(path)
	if depth > 0 {
		q.Set("depth", strconv.Itoa(depth))
	}
	var list EntryList
	err := f.s.c.do(ctx, http.MethodGet, f.s.path("files", "list"), q, nil, &list)
	return list.Entries, err
}

// Mkdir makes a directory and its parents; an existing one is no error.
func (f Files) Mkdir(ctx context.Context, path string) (Entry, error) {
	var e Entry
	in := MkdirRequest{Path: path, User: f.user, Parents: true}
	err := f.s.c.do(ctx, http.MethodPost, f.s.path("files", "mkdir"), nil, in, &e)
	return e, err
}

// Move renames a path.
func (f Files) Move(ctx context.Context, from, to string) (Entry, error) {
	var e Entry
	in := MoveRequest{From: from, To: to, User: f.user}
	err := f.s.c.do(ctx, http.MethodPost, f.s.path("files", "move"), nil, in, &e)
	return e, err
}

// Chmod changes permissions.
func (f Files) Chmod(ctx context.Context, path string, mode uint32) (Entry, error) {
	var e Entry
	in := ChmodRequest{Path: path, User: f.user, Mode: &mode}
	err := f.s.c.do(ctx, http.MethodPost, f.s.path("files", "chmod"), nil, in, &e)
	return e, err
}

// Chown changes who owns a path: names or numbers; what is empty stays.
func (f Files) Chown(ctx context.Context, path, owner, group string) (Entry, error) {
	var e Entry
	in := ChmodRequest{Path: path, User: f.user, Owner: owner, Group: group}
	err := f.s.c.do(ctx, http.MethodPost, f.s.path("files", "chmod"), nil, in, &e)
	return e, err
}

// Remove removes a path; a directory that is not empty needs recursive.
func (f Files) Remove(ctx context.Context, path string, recursive bool) error {
	q := f.query(path)
	if recursive {
		q.Set("recursive", "true")
	}
	return f.s.c.do(ctx, http.MethodDelete, f.s.path("files"), q, nil, nil)
}

// Watch yields changes below a directory until the loop is left. The first event is started: from then on nothing
// is missed.
func (f Files) Watch(ctx context.Context, path string, recursive bool) iter.Seq2[Event, error] {
	q := f.query(path)
	if recursive {
		q.Set("recursive", "true")
	}
	return func(yield func(Event, error) bool) {
		resp, err := f.s.c.send(ctx, http.MethodGet, f.s.path("files", "watch"), q, nil, ndjson)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer resp.Body.Close()
		decodeEvents(resp.Body, yield)
	}
}

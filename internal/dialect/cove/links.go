package cove

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
)

// Linked is what links ask of whoever keeps files.
type Linked interface {
	Redeem(ctx context.Context, id, token string) (artifact.Artifact, error)
	OpenLinked(ctx context.Context, a artifact.Artifact) (artifact.Content, error)
}

// LinkPrefix is where links lead.
const LinkPrefix = "/artifacts/"

// Links answers for links to artifacts, which need no key: what they hold says what they open. Nothing here logs a query.
type Links struct {
	artifacts Linked
	log       *slog.Logger
	mux       *http.ServeMux
}

// NewLinks makes the handler of everything below LinkPrefix.
func NewLinks(k Linked, log *slog.Logger) *Links {
	l := &Links{artifacts: k, log: log, mux: http.NewServeMux()}
	l.mux.HandleFunc("GET "+LinkPrefix+"{artifact}", l.serve(l.content)) // and HEAD
	l.mux.HandleFunc("GET "+LinkPrefix+"{artifact}/{$}", l.serve(l.content))
	l.mux.HandleFunc("GET "+LinkPrefix+"{artifact}/head", l.serve(l.head))
	l.mux.HandleFunc(LinkPrefix, l.serve(func(w http.ResponseWriter, r *http.Request) error {
		return fault.New(fault.NotFound, "a link to an artifact is %s{id}?token=…, and is read", LinkPrefix)
	}))
	return l
}

func (l *Links) ServeHTTP(w http.ResponseWriter, r *http.Request) { l.mux.ServeHTTP(w, r) }

func (l *Links) serve(handle func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		await(w, r)
		// The address holds a token: neither a cache nor the next page shall know it.
		w.Header().Set("Cache-Control", "private, no-cache")
		w.Header().Set("Referrer-Policy", "no-referrer")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		err := handle(w, r)
		if err == nil {
			return
		}
		err = blame(r.Context(), err)
		if fault.Is(err, fault.Internal) {
			l.log.Error("artifact cannot be read", "request", w.Header().Get("X-Request-Id"), "artifact", r.PathValue("artifact"), "error", err)
		}
		_ = respond(w, Status(fault.KindOf(err)), client.ErrorBody{Error: *wireFault(err)}) // the client has gone: nobody to tell
	}
}

func (l *Links) redeem(r *http.Request) (artifact.Artifact, error) {
	return l.artifacts.Redeem(r.Context(), r.PathValue("artifact"), r.URL.Query().Get("token"))
}

func (l *Links) content(w http.ResponseWriter, r *http.Request) error {
	a, err := l.redeem(r)
	if err != nil {
		return err
	}
	content, err := l.artifacts.OpenLinked(r.Context(), a)
	if err != nil {
		return err
	}
	defer content.Close()

	serveArtifact(w, r, &a, content)
	return nil
}

// ArtifactHead is what is told of an artifact to whoever has its link.
type ArtifactHead struct {
	ID        string    `json:"id"`
	SHA256    string    `json:"sha256"`
	MIME      string    `json:"mime"`
	Filename  string    `json:"filename"`
	Size      int64     `json:"size"`
	CreatedAt time.Time `json:"created_at"`
}

func (l *Links) head(w http.ResponseWriter, r *http.Request) error {
	a, err := l.redeem(r)
	if err != nil {
		return err
	}

	_ = respond(w, http.StatusOK, ArtifactHead{a.ID, a.SHA256, a.MIME, a.Name, a.Size, a.Created}) // the client has gone: nobody to tell
	return nil
}

// serveArtifact sends a content, or the part of it that is asked for. It was made by code that nobody knows and is served
// from our own address: a browser keeps it, and runs nothing of it.
func serveArtifact(w http.ResponseWriter, r *http.Request, a *artifact.Artifact, content artifact.Content) {
	h := w.Header()
	h.Set("Content-Type", contentType(a.MIME))
	h.Set("Content-Disposition", disposition(a.Name))
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("ETag", `"`+a.SHA256+`"`)
	if h.Get("Cache-Control") == "" {
		h.Set("Cache-Control", "private, no-cache")
	}
	watched := &watched{Content: content}
	http.ServeContent(w, r, "", a.Created, watched)
	if watched.err != nil {
		panic(http.ErrAbortHandler) // the connection breaks: whoever reads must not take what came for all of it
	}
}

// watched remembers why a content could not be read.
type watched struct {
	artifact.Content
	err error
}

func (c *watched) Read(p []byte) (int, error) {
	n, err := c.Content.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

func contentType(kind string) string {
	if strings.HasPrefix(kind, "text/") {
		return kind + "; charset=utf-8"
	}
	return kind
}

// disposition names the file for whoever saves it: in ASCII for old clients, and as it is for the others (RFC 5987).
func disposition(name string) string {
	plain := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' || r == '/' || r == '%' {
			return '_'
		}
		return r
	}, name)
	value := fmt.Sprintf("attachment; filename=%q", plain)
	if plain != name {
		value += "; filename*=UTF-8''" + strings.ReplaceAll(url.QueryEscape(name), "+", "%20")
	}
	if _, _, err := mime.ParseMediaType(value); err != nil {
		return "attachment"
	}
	return value
}

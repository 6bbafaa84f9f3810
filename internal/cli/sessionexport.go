package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/covehq/cove/client"
)

func (a *invocation) sessionExport() *cobra.Command {
	return &cobra.Command{
		Use: "export KEY DIR", Short: "Write a session's log, state and artifacts into a directory",
		Long: "Write everything that is known about a session into a directory that is new or empty: session.log, session_metadata.json,\n" +
			"python_state.json and, below artifacts, every file that it left, checked against its digest. Of files with the same path the\n" +
			"newest keeps its name; those before it have their cell in theirs. Works for sessions of every storage, also after their end.",
		Example:           "  cove session export chat-7 ./chat-7 && cove session show ./chat-7",
		Args:              exactArgs(2, "the key of a session and a directory"),
		ValidArgsFunction: a.completeSessions,
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			info, err := cl.GetSession(c.Context(), args[0])
			if err != nil {
				return err
			}
			root, err := emptyDir(args[1])
			if err != nil {
				return err
			}
			defer root.Close()
			e := &exporter{cl: cl, root: root, names: map[string]bool{}}
			done := a.working(e.meter.progress("exporting " + info.Key))
			err = e.all(c.Context(), info)
			done()
			if err != nil {
				return err
			}
			return a.print(e.done, func(t *table) {
				t.row(fmt.Sprintf("%s and %s of session %s in %s", count(e.done.Lines, "entry", "entries"), count(e.done.Artifacts, "artifact", "artifacts"), info.Key, args[1]))
			})
		},
	}
}

// emptyDir makes a directory, or takes one with nothing in it: an export destroys nothing.
func emptyDir(dir string) (*os.Root, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	if len(entries) > 0 {
		return nil, fmt.Errorf("%s is not empty; name a directory that is not there yet", dir)
	}
	return os.OpenRoot(dir)
}

// exporter writes a session below one directory and nowhere else, whatever its files are called.
type exporter struct {
	cl    *client.Client
	root  *os.Root
	names map[string]bool // below artifacts
	meter meter
	done  struct {
		Session   string `json:"session"`
		Lines     int    `json:"lines"`
		Artifacts int    `json:"artifacts"`
	}
}

func (e *exporter) all(ctx context.Context, info *client.SessionInfo) error {
	e.done.Session = info.Key
	if err := e.writeJSON(sessionMetadataFile, sessionMetadata(info)); err != nil {
		return err
	}
	state, err := e.cl.SessionState(ctx, info.Key)
	if err != nil {
		return err
	}
	if err := e.writeJSON(sessionStateFile, state); err != nil {
		return err
	}
	if err := e.log(ctx, info.Key); err != nil {
		return err
	}
	if err := e.root.Mkdir(sessionArtifactsDir, 0o755); err != nil {
		return err
	}
	for art, err := range e.cl.Artifacts(ctx, client.ArtifactsRequest{Session: info.Key}) {
		if err != nil {
			return err
		}
		if err := e.artifact(ctx, &art); err != nil {
			return fmt.Errorf("artifact %s (%s): %w", art.Path, art.ID, err)
		}
		e.done.Artifacts++
	}
	return nil
}

func (e *exporter) writeJSON(name string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return e.write(name, strings.NewReader(string(text)+"\n"))
}

func (e *exporter) write(name string, content io.Reader) (err error) {
	f, err := e.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(io.MultiWriter(f, &e.meter), content)
	return err
}

func (e *exporter) log(ctx context.Context, key string) (err error) {
	f, err := e.root.OpenFile(sessionLogFile, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(f)
	defer func() { err = errors.Join(err, out.Flush(), f.Close()) }()
	lines := json.NewEncoder(out)
	for line, err := range e.cl.SessionLog(ctx, key, client.SessionLogRequest{}) {
		if err != nil {
			return err
		}
		if err := lines.Encode(line); err != nil {
			return err
		}
		e.done.Lines++
	}
	return nil
}

// artifact writes one file; its bytes are checked when the last of them is read.
func (e *exporter) artifact(ctx context.Context, art *client.Artifact) error {
	name := e.free(art)
	if err := e.root.MkdirAll(path.Dir(name), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	_, content, err := e.cl.ReadArtifact(ctx, art.ID)
	if err != nil {
		return err
	}
	defer content.Close()
	if err := e.write(name, content); err != nil {
		return errors.Join(err, e.root.Remove(name))
	}
	return nil
}

// free is a name below artifacts that no other file has. They come newest first.
func (e *exporter) free(art *client.Artifact) string {
	local := art.Path
	if !filepath.IsLocal(filepath.FromSlash(local)) {
		local = art.ID
	}
	ext := path.Ext(local)
	stem := strings.TrimSuffix(local, ext)
	name := local
	for _, other := range []string{local, fmt.Sprintf("%s.cell%d%s", stem, art.Cell, ext), stem + "." + art.ID + ext} {
		if name = other; !e.taken(name) {
			break
		}
	}
	e.names[name] = true
	return path.Join(sessionArtifactsDir, name)
}

// taken reports whether a name is a file already, or a directory above or below one.
func (e *exporter) taken(name string) bool {
	for other := range e.names {
		if other == name || strings.HasPrefix(other, name+"/") || strings.HasPrefix(name, other+"/") {
			return true
		}
	}
	return false
}

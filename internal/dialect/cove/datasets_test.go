package cove_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
)

// stopped are sessions without sandboxes: a key's first word is its access to data.
type stopped struct {
	mu    sync.Mutex
	noted []session.LogLine
}

func (s *stopped) Resolve(_ context.Context, p auth.Principal, key string) (session.Session, error) {
	access, _, ok := strings.Cut(key, "-")
	if !ok || p.Tenant != "acme" {
		return session.Session{}, fault.New(fault.NotFound, "there is no session %q", key)
	}
	return session.Session{ID: "ses_1", Tenant: p.Tenant, Key: key, Spec: session.Spec{Datasets: session.Datasets{Access: access}}}, nil
}

func (s *stopped) Agent(context.Context, auth.Principal, string) (*agentapi.Client, error) {
	return nil, fault.New(fault.Gone, "the session was stopped")
}

func (s *stopped) Note(_ context.Context, _ auth.Principal, _ string, line session.LogLine) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noted = append(s.noted, line)
	return errors.New("the disk is full") // which changes no answer
}

// newDataWorld is an API with datasets on a real disk and database.
func newDataWorld(t *testing.T) (*world, *stopped) {
	w, sessions, dir := newUnstarted(t), &stopped{}, t.TempDir()
	index, err := sqlstore.Open(filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	shelf, err := local.OpenShelf(filepath.Join(dir, "datasets"), nil)
	if err != nil {
		t.Fatal(err)
	}
	store := dataset.New(dataset.Config{MaxSize: 10}, index, shelf, nil, slog.New(slog.DiscardHandler))
	if _, err := store.Mount(t.Context(), "acme", "ses_1"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close(); shelf.Close(); index.Close() })
	w.api.SetDatasets(session.NewData(sessions, store, slog.New(slog.DiscardHandler)))
	w.Start()
	t.Cleanup(w.Close)
	w.client = newClient(t, w.URL, w.key)
	return w, sessions
}

func TestDatasetRoutes(t *testing.T) {
	w, sessions := newDataWorld(t)
	c, ctx := w.client, t.Context()
	same := cmpopts.IgnoreFields(client.Dataset{}, "UpdatedAt")
	const sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" // of abc
	want := client.Dataset{ID: "x", Status: "loaded", Path: "/datasets/x.parquet", Size: 3, SHA256: sum}
	got, err := c.StageDataset(ctx, "api-1", "x", "", strings.NewReader("abc"))
	if diff := cmp.Diff(&want, got, same); diff != "" || err != nil {
		t.Errorf("staged: %s %v", diff, err)
	}
	again := client.Dataset{ID: "y", Status: "loaded", Path: "/datasets/y.csv", Size: 3, SHA256: sum}
	got, err = c.MarkDataset(ctx, "api-1", "y", client.DatasetRequest{Status: "loaded", SHA256: sum, File: "y.csv"})
	if diff := cmp.Diff(&again, got, same); diff != "" || err != nil {
		t.Errorf("by its digest: %s %v", diff, err)
	}
	failed := client.Dataset{ID: "z", Status: "failed", Error: "no such table"}
	got, err = c.MarkDataset(ctx, "api-1", "z", client.DatasetRequest{Status: "failed", Error: "no such table"})
	if diff := cmp.Diff(&failed, got, same); diff != "" || err != nil {
		t.Errorf("failed: %s %v", diff, err)
	}
	if got, err := c.MarkDataset(ctx, "api-1", "x", client.DatasetRequest{Status: "pending"}); err != nil || got.Status != "loaded" {
		t.Errorf("pending, of one that is loaded: %+v %v", got, err)
	}
	all, err := c.Datasets(ctx, "api-1")
	if diff := cmp.Diff([]client.Dataset{want, again, failed}, all, same); diff != "" || err != nil {
		t.Errorf("listed: %s %v", diff, err)
	}
	if err := c.RemoveDataset(ctx, "api-1", "z"); err != nil {
		t.Error(err)
	}
	if all, err := c.Datasets(ctx, "none-1"); err != nil || all == nil {
		t.Errorf("S4.83 of a session without: %v %v", all, err)
	}
	lines := []session.LogLine{{Event: "dataset_loaded", Dataset: "x", SHA256: sum}, {Event: "dataset_loaded", Dataset: "y", SHA256: sum}, {Event: "dataset_failed", Dataset: "z", Error: "no such table"}}
	if diff := cmp.Diff(lines, sessions.noted); diff != "" {
		t.Errorf("the log: %s", diff)
	}
}

func TestDatasetRoutesRefuse(t *testing.T) {
	w, sessions := newDataWorld(t)
	c, ctx := w.client, t.Context()
	stage := func(key, id, content string) error {
		_, err := c.StageDataset(ctx, key, id, "", io.MultiReader(strings.NewReader(content))) // of a length that is not known
		return err
	}
	mark := func(req client.DatasetRequest) error {
		_, err := c.MarkDataset(ctx, "api-1", "x", req)
		return err
	}
	_, local := c.Datasets(ctx, "local_ro-1")
	for claim, c := range map[string]struct {
		err    error
		status int
		words  string
	}{
		"S4.73 a session without datasets":       {stage("none-1", "x", ""), http.StatusConflict, "datasets access api"},
		"S4.73 a session with the host's":        {stage("local_ro-1", "x", ""), http.StatusConflict, "put files into that directory"},
		"S4.52 an id that leads elsewhere":       {stage("api-1", "../x", ""), http.StatusBadRequest, "letters, digits"},
		"a session that there is not":            {stage("unknown", "x", ""), http.StatusNotFound, "no session"},
		"one that is too large":                  {stage("api-1", "big", "eleven byte"), http.StatusBadRequest, "datasets.max_size"},
		"a status that there is not":             {mark(client.DatasetRequest{Status: "ready"}), http.StatusBadRequest, "pending, failed or loaded"},
		"loaded without content":                 {mark(client.DatasetRequest{Status: "loaded"}), http.StatusBadRequest, "sha256"},
		"loaded with content that is not here":   {mark(client.DatasetRequest{Status: "loaded", SHA256: strings.Repeat("0", 64)}), http.StatusNotFound, "send it"},
		"to remove one that is not there":        {c.RemoveDataset(ctx, "api-1", "x"), http.StatusNotFound, "no dataset"},
		"a list of the host's without a sandbox": {local, http.StatusGone, "stopped"},
		"a session that stages into none, marked": {func() error {
			_, err := c.MarkDataset(ctx, "none-1", "x", client.DatasetRequest{Status: "pending"})
			return err
		}(), http.StatusConflict, "access api"},
	} {
		var e *client.Error
		if !errors.As(c.err, &e) || e.Status != c.status || !strings.Contains(e.Message, c.words) {
			t.Errorf("%s: got %v", claim, c.err)
		}
	}
	if len(sessions.noted) != 1 || sessions.noted[0].Event != "dataset_failed" || sessions.noted[0].Dataset != "big" {
		t.Errorf("the log has more than the one that could have come: %+v", sessions.noted)
	}
	plain := newWorld(t)
	_, err := plain.client.Datasets(ctx, "api-1")
	var e *client.Error
	if !errors.As(err, &e) || e.Kind != client.Unsupported {
		t.Errorf("a server without datasets: %v", err)
	}
}

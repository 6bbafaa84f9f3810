package telemetry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// TestNamesOfFilesAreInNoSpan: a sentence for the caller may name a file; a span has the kind of it.
func TestNamesOfFilesAreInNoSpan(t *testing.T) {
	setOTEL(t, map[string]string{"OTEL_TRACES_EXPORTER": "console"})
	var out bytes.Buffer
	tracing, err := telemetry.OpenTracing(t.Context(), "v1", &out, quiet)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	index, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()

	blobs, err := local.Open(filepath.Join(dir, "blobs"), local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	keeper, err := artifact.New(t.Context(), artifact.Config{MaxFileSize: 10}, blobs, index)
	if err != nil {
		t.Fatal(err)
	}
	defer keeper.Close()
	large := filepath.Join(dir, "hunter2.csv")
	if err := os.WriteFile(large, make([]byte, 11), 0o644); err != nil {
		t.Fatal(err)
	}
	_, kept := tracing.Artifacts(keeper).Keep(t.Context(), oneAgent(t, dir), "acme", artifact.Origin{}, large)

	shelf, err := local.OpenShelf(filepath.Join(dir, "datasets"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer shelf.Close()
	store := dataset.New(dataset.Config{}, index, shelf, nil, slog.New(slog.DiscardHandler))
	none := func(context.Context) (*agentapi.Client, error) { return nil, errors.New("none") }
	stage := func(id string) error {
		up := dataset.Upload{ID: id, File: "hunter2.parquet", Body: strings.NewReader("x")}
		_, err := tracing.Datasets(store).Stage(t.Context(), "acme", "ses_1", up, none)
		return err
	}
	if _, err := store.Mount(t.Context(), "acme", "ses_1"); err != nil {
		t.Fatal(err)
	}
	staged := errors.Join(stage("hunter2"), stage("again"))

	if err := tracing.Close(); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{kept, staged} {
		if err == nil || !strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the caller is told %v", err)
		}
	}
	for _, want := range []string{"sandbox.artifact.ingest", "sandbox.dataset.stage", "exhausted", "conflict"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no span says %s", want)
		}
	}
	if strings.Contains(out.String(), "hunter2") {
		t.Errorf("a span has the name: %s", &out)
	}
}

// oneAgent is a real agent.
func oneAgent(t *testing.T, home string) *agentapi.Client {
	t.Helper()
	a, err := agent.New(agent.Config{Boot: agentapi.Boot{ID: "sb1", Workdir: home}, Home: home})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return agentapi.NewClient(func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go a.HandleConn(theirs)
		return ours, nil
	})
}

package cove_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
)

func TestASandboxIsPausedAndResumed(t *testing.T) {
	w := newWorld(t)
	sb, err := w.client.Create(t.Context(), client.CreateRequest{TimeoutSeconds: 600, IdleAction: "pause"})
	if err != nil {
		t.Fatal(err)
	}
	if sb.IdleAction != "pause" || sb.AutoResume || !sb.PausedAt.IsZero() {
		t.Errorf("created %+v", sb.SandboxInfo)
	}
	if err := sb.Pause(t.Context(), client.PauseRequest{TimeoutSeconds: 7200}); err != nil {
		t.Fatal(err)
	}
	if left := time.Until(sb.Deadline); sb.State != "paused" || sb.PausedAt.IsZero() || left < time.Hour || left > 2*time.Hour {
		t.Errorf("paused %+v", sb.SandboxInfo)
	}
	if _, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"}); client.KindOf(err) != client.Conflict || !strings.Contains(err.Error(), "paused; resume it first") {
		t.Errorf("a run in a paused sandbox: %v", err)
	}
	if _, err := sb.Files().Stat(t.Context(), "x"); client.KindOf(err) != client.Conflict {
		t.Errorf("a file of a paused sandbox: %v", err)
	}
	if u, err := sb.Usage(t.Context()); err != nil || u.CPUMS != 7 {
		t.Errorf("usage %+v, %v", u, err)
	}
	var listed []string
	for info, err := range w.client.List(t.Context(), client.ListRequest{States: []string{"paused"}}) {
		if err != nil {
			t.Fatal(err)
		}
		listed = append(listed, info.ID)
	}
	if diff := cmp.Diff([]string{sb.ID}, listed); diff != "" {
		t.Error(diff)
	}
	if _, err := sb.Fork(t.Context(), client.ForkRequest{}); client.KindOf(err) != client.Conflict {
		t.Errorf("a fork of a paused sandbox: %v", err)
	}
	if err := sb.Resume(t.Context(), client.ResumeRequest{}); err != nil {
		t.Fatal(err)
	}
	if left := time.Until(sb.Deadline); sb.State != "running" || !sb.PausedAt.IsZero() || left > 10*time.Minute {
		t.Errorf("resumed %+v", sb.SandboxInfo)
	}
	auto := true
	if err := sb.Pause(t.Context(), client.PauseRequest{AutoResume: &auto}); err != nil || !sb.AutoResume {
		t.Fatalf("%+v, %v", sb.SandboxInfo, err)
	}
	if out, err := sb.Run(t.Context(), client.RunRequest{Code: "1+1"}); err != nil || out.Text() != "2" {
		t.Errorf("a run that resumes: %+v, %v", out, err)
	}
	if err := sb.Resume(t.Context(), client.ResumeRequest{TimeoutSeconds: 5}); err != nil || sb.State != "running" || time.Until(sb.Deadline) < time.Minute {
		t.Errorf("a running sandbox is as it is: %+v, %v", sb.SandboxInfo, err)
	}
	if err := sb.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"pause": sb.Pause(t.Context(), client.PauseRequest{}), "resume": sb.Resume(t.Context(), client.ResumeRequest{}),
	} {
		if client.KindOf(err) != client.Gone {
			t.Errorf("%s of an ended sandbox: %v", what, err)
		}
	}
}

func TestASandboxIsForked(t *testing.T) {
	w := newWorld(t)
	sb, err := w.client.Create(t.Context(), client.CreateRequest{Metadata: map[string]string{"a": "b"}, Env: map[string]string{"SECRET": "1"}})
	if err != nil {
		t.Fatal(err)
	}
	forks, err := sb.Fork(t.Context(), client.ForkRequest{
		Count: 2, Kernel: "k2", Busy: "refuse", TimeoutSeconds: 60, Metadata: map[string]string{"branch": "x"}, Env: map[string]string{"A": "1"}, InheritEnv: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if forks.StallMS != 7.25 || forks.MemoryBytes != 50<<20 || len(forks.Sandboxes) != 2 {
		t.Errorf("%+v", forks)
	}
	if diff := cmp.Diff([]client.NotCopied{{Kind: "process", What: "sleep 100 (pid 17)"}}, forks.NotCopied); diff != "" {
		t.Error(diff)
	}
	req := w.driver.forks[0]
	if req.Parent != sb.ID || req.Kernel != "k2" || !req.Refuse || len(req.Children) != 2 || !req.Children[1].InheritEnv || req.Children[1].Env["A"] != "1" {
		t.Errorf("the driver was asked for %+v", req)
	}
	for _, child := range forks.Sandboxes {
		if child.ForkedFrom != sb.ID || child.State != "running" || child.Metadata["branch"] != "x" || child.Metadata["a"] != "" {
			t.Errorf("%+v", child.SandboxInfo)
		}
		if out, err := child.Run(t.Context(), client.RunRequest{Code: "1+1"}); err != nil || out.Text() != "2" {
			t.Errorf("a run in a copy: %+v, %v", out, err)
		}
	}
	status, body := w.do(t, "POST", "/sandboxes/"+sb.ID+"/fork", "")
	var one client.ForkResult
	if status != 201 || json.Unmarshal(body, &one) != nil || len(one.Sandboxes) != 1 {
		t.Errorf("a fork that says nothing: %d %s", status, body)
	}
	if w.driver.forks[1].Refuse {
		t.Error("a busy kernel is refused without having been asked to")
	}
	var told []string
	for e, err := range w.client.Events(t.Context(), client.EventsRequest{Sandbox: one.Sandboxes[0].ID}) {
		if err != nil {
			t.Fatal(err)
		}
		told = append(told, e.Type+" "+e.Message)
	}
	if diff := cmp.Diff([]string{"created ", "forked " + sb.ID, "started "}, told); diff != "" {
		t.Error(diff)
	}
	if err := sb.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.Fork(t.Context(), client.ForkRequest{}); client.KindOf(err) != client.Gone {
		t.Errorf("a fork of an ended sandbox: %v", err)
	}
}

func TestASnapshotIsATemplateOfItsTenant(t *testing.T) {
	w := newWorld(t)
	key, _, err := w.keys.Create(t.Context(), "other", "", false)
	if err != nil {
		t.Fatal(err)
	}
	other := newClient(t, w.URL, string(key))
	sb := w.sandbox(t)
	made, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "mine", Description: "with pandas"})
	if err != nil {
		t.Fatal(err)
	}
	want := client.TemplateInfo{
		Name: "mine", Description: "with pandas", From: "python", Source: "snapshot", Digest: "d2", Built: true, TenantOwned: true, User: "user",
		Python: &client.TemplatePython{Executable: "/usr/bin/python3", Version: "3.13.0"}, CreatedAt: snapshotTime,
	}
	if diff := cmp.Diff(&want, made); diff != "" {
		t.Error(diff)
	}
	if got, err := w.client.Template(t.Context(), "mine"); err != nil || !cmp.Equal(&want, got) {
		t.Errorf("%s, %v", cmp.Diff(&want, got), err)
	}
	shared := []client.TemplateInfo{
		{Name: "python", Source: "built-in", Digest: "d1", Built: true, User: "user", Python: want.Python}, {Name: "site", From: "python", Source: "file"},
	}
	for c, list := range map[*client.Client][]client.TemplateInfo{w.client: append(shared[:2:2], want), other: shared} {
		if got, err := c.Templates(t.Context()); err != nil || !cmp.Equal(list, got) {
			t.Errorf("%s, %v", cmp.Diff(list, got), err)
		}
	}
	if got, err := other.Template(t.Context(), "site"); err != nil || got.Built || got.Source != "file" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := w.client.Create(t.Context(), client.CreateRequest{Template: "mine"}); err != nil {
		t.Error(err)
	}
	_, err = other.Create(t.Context(), client.CreateRequest{Template: "mine"})
	_, err2 := other.Template(t.Context(), "mine")
	_, err3 := other.Sandbox(sb.ID).Snapshot(t.Context(), client.SnapshotRequest{Name: "theirs"})
	for _, err := range []error{err, err2, err3, other.RemoveTemplate(t.Context(), "mine")} {
		if client.KindOf(err) != client.NotFound {
			t.Errorf("another tenant: %v", err)
		}
	}
	if _, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "mine"}); client.KindOf(err) != client.Conflict {
		t.Errorf("a name that is taken: %v", err)
	}
	if err := w.client.RemoveTemplate(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	if err := w.client.RemoveTemplate(t.Context(), "mine"); client.KindOf(err) != client.NotFound {
		t.Errorf("a second removal: %v", err)
	}
}

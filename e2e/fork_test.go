package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// fork makes branches that end with the test.
func (s *sandbox) fork(srv *server, req client.ForkRequest) ([]*sandbox, *client.Forks) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	forks, err := s.Fork(ctx, req)
	if err != nil {
		s.t.Fatalf("fork: %v", err)
	}
	var branches []*sandbox
	for _, b := range forks.Sandboxes {
		s.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_ = srv.Sandbox(b.ID).Kill(ctx)
		})
		branches = append(branches, &sandbox{s.t, b})
	}
	return branches, forks
}

// TestForkTriesThreeIdeas is what a fork is for: branch an agent's state, try three ideas, keep one.
func TestForkTriesThreeIdeas(t *testing.T) {
	s := sharedServer(t)
	parent := s.create(t, client.CreateRequest{Env: map[string]string{"TOKEN": "secret-of-the-parent"}, Metadata: map[string]string{"who": "parent"}})
	parent.value("import pandas as pd; df = pd.DataFrame({'x': range(10)}); own = b'x' * (16 << 20); _ = open('notes', 'w').write('before\\n')")
	branches, forks := parent.fork(s, client.ForkRequest{Count: 3, Metadata: map[string]string{"who": "branch"}, Env: map[string]string{"IDEA": "1"}})
	if len(branches) != 3 || forks.StallMS <= 0 || forks.MemoryBytes < 8<<20 {
		t.Fatalf("%d sandboxes, stall %v ms, %d bytes", len(branches), forks.StallMS, forks.MemoryBytes)
	}
	if !slices.Contains(forks.NotCopied, client.NotCopied{Kind: "environment", What: "TOKEN"}) {
		t.Errorf("the withheld variable is not told: %v", forks.NotCopied)
	}
	for i, b := range branches {
		if b.ForkedFrom != parent.ID || b.Metadata["who"] != "branch" || b.State != "running" {
			t.Errorf("branch %d: %+v", i, b.SandboxInfo)
		}
		b.value(fmt.Sprintf("df['y'] = df.x * %d; _ = open('notes', 'a').write('branch\\n')", i+2))
	}
	parent.kill() // it may end first
	for i, b := range branches {
		want := fmt.Sprintf("(%d, ['before', 'branch'], None, '1')", 45*(i+2))
		if got := b.value("import os; (int(df.y.sum()), open('notes').read().split(), os.environ.get('TOKEN'), os.environ['IDEA'])"); got != want {
			t.Errorf("branch %d says %s, want %s", i, got, want)
		}
		if got := b.sh("echo ${TOKEN-none} $IDEA; wc -l < notes"); got != "none 1\n2" {
			t.Errorf("a command in branch %d: %q", i, got)
		}
	}
	again, _ := branches[1].fork(s, client.ForkRequest{})
	if got := again[0].value("int(df.y.sum())"); got != "135" {
		t.Errorf("a branch of a branch says %s", got)
	}
}

func TestForkInheritsSecretsWhenAsked(t *testing.T) {
	s := sharedServer(t)
	parent := s.create(t, client.CreateRequest{Env: map[string]string{"TOKEN": "secret-of-the-parent"}})
	branches, forks := parent.fork(s, client.ForkRequest{InheritEnv: true})
	if got := branches[0].value("import os; os.environ['TOKEN']"); got != "'secret-of-the-parent'" {
		t.Errorf("%q", got)
	}
	if len(forks.NotCopied) != 0 {
		t.Errorf("not copied: %v", forks.NotCopied)
	}
}

func TestForkTellsWhatItDoesNotCopy(t *testing.T) {
	s := sharedServer(t)
	parent := s.create(t, client.CreateRequest{})
	if _, err := parent.StartKernel(t.Context(), client.KernelRequest{Name: "second"}); err != nil {
		t.Fatal(err)
	}
	parent.value("import subprocess, socket; p = subprocess.Popen(['sleep', '1000']); s = socket.socket(); f = open('kept', 'w+')")
	branches, forks := parent.fork(s, client.ForkRequest{})
	told := fmt.Sprint(forks.NotCopied)
	for _, want := range []string{"{kernel second}", "{process sleep 1000 (pid", "{socket socket:["} {
		if !strings.Contains(told, want) {
			t.Errorf("%s is not told: %s", want, told)
		}
	}
	if strings.Contains(told, "kept") {
		t.Errorf("a file that is opened again is told as lost: %s", told)
	}
	if got := branches[0].sh("pgrep -c sleep || true"); got != "0" {
		t.Errorf("%s processes of the parent are in the branch", got)
	}
	parent.kill()
}

func TestForkOfWhatCannotBeForked(t *testing.T) {
	s := newServer(t)
	living := s.create(t, client.CreateRequest{})
	refused := func(sb *client.Sandbox, req client.ForkRequest, kind client.Kind, words ...string) {
		t.Helper()
		_, err := sb.Fork(t.Context(), req)
		expect(t, err, kind, words...)
	}
	refused(living.Sandbox, client.ForkRequest{Count: -1}, client.Invalid, "100")
	refused(living.Sandbox, client.ForkRequest{Count: 10_000}, client.Invalid, "100")
	refused(living.Sandbox, client.ForkRequest{Busy: "perhaps"}, client.Invalid, "perhaps")
	refused(living.Sandbox, client.ForkRequest{Kernel: "nobody"}, client.Conflict, "nobody")
	long := map[string]string{"LONG": strings.Repeat("x", 3000)} // each copy has its own, and one message has them all
	refused(living.Sandbox, client.ForkRequest{Count: 100, Env: long}, client.Exhausted, "fewer copies")
	refused(s.Sandbox("sbnobody"), client.ForkRequest{}, client.NotFound)

	paused := s.create(t, client.CreateRequest{})
	if err := paused.Pause(t.Context(), client.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	refused(paused.Sandbox, client.ForkRequest{}, client.Conflict, "paused")

	ended := s.create(t, client.CreateRequest{})
	ended.kill()
	refused(ended.Sandbox, client.ForkRequest{}, client.Gone, "killed")

	done := make(chan *client.Output, 1)
	go func() {
		done <- living.run(client.RunRequest{Code: "import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\nlate = 1"})
	}()
	eventually(t, "the cell runs", 2*time.Minute, func() bool {
		kernels, err := living.Kernels(t.Context())
		return err == nil && len(kernels) > 0 && kernels[0].State == "busy"
	})
	refused(living.Sandbox, client.ForkRequest{Busy: "refuse"}, client.Conflict, "busy")
	var branches []*sandbox
	forked := make(chan struct{})
	go func() {
		defer close(forked)
		branches, _ = living.fork(s, client.ForkRequest{})
	}()
	select { // a fork that does not wait for the cell ends now
	case <-forked:
	case <-time.After(time.Second):
	}
	living.sh("touch /tmp/go")
	<-done
	if <-forked; len(branches) != 1 {
		t.FailNow() // the fork said why
	}
	if got := branches[0].value("late"); got != "1" {
		t.Errorf("the branch is of before the cell's end: %s", got)
	}
	count := 0
	for _, err := range s.List(t.Context(), client.ListRequest{States: []string{"starting", "running", "paused", "stopping"}}) {
		if err != nil {
			t.Fatal(err)
		}
		count++
	}
	if count != 3 {
		t.Errorf("%d sandboxes live: not the parent, the paused one and the branch alone", count)
	}
}

// TestPausedSandboxesSurviveTheServer also shows that they cost no processor time and wake when they are used.
func TestPausedSandboxesSurviveTheServer(t *testing.T) {
	s := newServer(t)
	yes := true
	sb := s.create(t, client.CreateRequest{})
	sb.value("x = 41; import subprocess; p = subprocess.Popen(['bash', '-c', 'while :; do :; done'])")
	if err := sb.Pause(t.Context(), client.PauseRequest{AutoResume: &yes}); err != nil {
		t.Fatal(err)
	}
	used := func() int64 {
		u, err := s.Sandbox(sb.ID).Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return u.CPUMS
	}
	before := used()
	s.crash(t)
	s.start(t)
	if info := s.after(t, sb.ID); info.State != "paused" || info.PausedAt.IsZero() {
		t.Fatalf("after a crash it is %s since %v", info.State, info.PausedAt)
	}
	if after := used(); after != before {
		t.Errorf("it used %d ms of processor time while it was paused", after-before)
	}
	woken := &sandbox{t, s.Sandbox(sb.ID)}
	if got := woken.value("x + 1"); got != "42" {
		t.Errorf("after waking: %s", got)
	}
	if info := s.after(t, sb.ID); info.State != "running" {
		t.Errorf("it is %s after it was used", info.State)
	}
	asleep := s.create(t, client.CreateRequest{})
	if err := asleep.Pause(t.Context(), client.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	_, err := asleep.Run(t.Context(), client.RunRequest{Code: "1"})
	expect(t, err, client.Conflict, "paused", "resume")
	if err := asleep.Resume(t.Context(), client.ResumeRequest{}); err != nil {
		t.Fatal(err)
	}
	if got := asleep.value("1 + 1"); got != "2" {
		t.Error(got)
	}
}

func TestASnapshotIsATemplate(t *testing.T) {
	s := newServer(t)
	sb := s.create(t, client.CreateRequest{})
	sb.sh("mkdir -p project && echo one > project/a && rm -f ~/.bashrc && ln -s a project/link")
	sb.value("x = 1")
	made, err := sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "mine", Description: "with a project"})
	if err != nil {
		t.Fatal(err)
	}
	if made.Name != "mine" || made.Source != "snapshot" || !made.TenantOwned {
		t.Errorf("%+v", made)
	}
	sb.sh("echo two > project/a")
	_, err = sb.Snapshot(t.Context(), client.SnapshotRequest{Name: "mine"})
	expect(t, err, client.Conflict, "mine")
	again := s.create(t, client.CreateRequest{Template: "mine"})
	if got := again.sh("cat project/link; ls -A ~ | grep -c bashrc || true"); got != "one\n0" {
		t.Errorf("the files of the snapshot: %q", got)
	}
	if got := again.value("'x' in globals()"); got != "False" {
		t.Error("variables came with the files")
	}
	again.sh("echo three > project/a")
	s.crash(t)
	s.start(t)
	third := s.create(t, client.CreateRequest{Template: "mine"})
	if got := third.sh("cat project/a"); got != "one" {
		t.Errorf("a sandbox of the snapshot changed it: %q", got)
	}
	if err := s.RemoveTemplate(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	_, err = s.Create(t.Context(), client.CreateRequest{Template: "mine"})
	expect(t, err, client.NotFound, "mine")
	if got := third.sh("cat project/a"); got != "one" {
		t.Errorf("a living sandbox lost the files of a removed template: %q", got)
	}
	expect(t, s.RemoveTemplate(t.Context(), "python"), client.Denied)
}

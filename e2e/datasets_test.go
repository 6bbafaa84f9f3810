package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/client"
)

// dataSession is a session of a test, by its key.
type dataSession struct {
	t   testing.TB
	s   *server
	key string
}

func (s *server) dataSession(t testing.TB, key string, req client.SessionRequest) *dataSession {
	t.Helper()
	d := &dataSession{t, s, key}
	d.open(req)
	t.Cleanup(func() { _, _ = s.call(http.MethodDelete, "/sessions/"+key, nil, nil) }) // the test may have ended its server
	return d
}

// call asks the API as a program without our client would.
func (s *server) call(method, path string, in, out any) (int, error) {
	body, err := json.Marshal(in)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, s.url+client.Prefix+path, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("X-API-Key", s.key)
	req.Header.Set("Accept", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= 300 {
		return resp.StatusCode, errors.Join(fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text), err)
	}
	if out == nil || len(text) == 0 {
		return resp.StatusCode, nil
	}
	return resp.StatusCode, json.Unmarshal(text, out)
}

func (d *dataSession) call(method, path string, in, out any) {
	d.t.Helper()
	if _, err := d.s.call(method, "/sessions/"+d.key+path, in, out); err != nil {
		d.t.Fatal(err)
	}
}

func (d *dataSession) open(req client.SessionRequest) (info client.SessionInfo) {
	d.t.Helper()
	d.call(http.MethodPut, "", req, &info)
	return info
}

func (d *dataSession) run(code string) client.SessionOutput {
	d.t.Helper()
	var out client.SessionOutput
	d.call(http.MethodPost, "/run", client.SessionRunRequest{Code: code}, &out)
	return out
}

// prints runs a cell that must succeed and returns what it printed.
func (d *dataSession) prints(code string) string {
	d.t.Helper()
	out := d.run(code)
	if out.Outcome != client.OutcomeOK {
		d.t.Fatalf("%.80q ended %s: %+v %s", code, out.Outcome, out.Error, out.Message)
	}
	return strings.TrimSpace(out.Stdout)
}

func (d *dataSession) stage(id, file string, content io.Reader) client.Dataset {
	d.t.Helper()
	got, err := d.s.StageDataset(d.t.Context(), d.key, id, file, content)
	if err != nil {
		d.t.Fatalf("stage %s: %v", id, err)
	}
	return *got
}

func (d *dataSession) list() []client.Dataset {
	d.t.Helper()
	all, err := d.s.Datasets(d.t.Context(), d.key)
	if err != nil {
		d.t.Fatal(err)
	}
	return all
}

func api(storage string) client.SessionRequest {
	return client.SessionRequest{Storage: storage, Datasets: &client.SessionDatasets{Access: "api"}}
}

func localData(path string) client.SessionRequest {
	return client.SessionRequest{Datasets: &client.SessionDatasets{Access: "local_ro", Path: path}}
}

var sometime = cmpopts.IgnoreFields(client.Dataset{}, "UpdatedAt", "SHA256")

// refused wants an answer of that status whose sentence holds these words.
func refused(t testing.TB, claim string, err error, status int, words string) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || e.Status != status || !strings.Contains(e.Message, words) {
		t.Errorf("%s: got %v", claim, err)
	}
}

func TestDatasetsByAPI(t *testing.T) {
	s := sharedServer(t)
	for _, c := range []struct{ name, storage string }{
		{"S4.24 S4.68 S4.81 TMPFS_API: what is staged is in /session/data, and pandas reads it", "tmpfs"},
		{"S4.25 BIND_API: the same, and after a stop", "bind"},
		{"the same on disk", "disk"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := s.dataSession(t, "data-"+c.storage, api(c.storage))
			d.prints("import pandas as pd; pd.DataFrame({'x': [1, 2, 39]}).to_parquet('/tmp/made.parquet')")
			parquet, err := s.Sandbox(d.open(api(c.storage)).Sandbox).Files().Read(t.Context(), "/tmp/made.parquet")
			if err != nil {
				t.Fatal(err)
			}
			got := d.stage("sales", "", bytes.NewReader(parquet))
			d.stage("notes.txt", "", strings.NewReader("hello"))
			want := []client.Dataset{
				{ID: "notes.txt", Status: "loaded", Path: "/session/data/notes.txt", Size: 5},
				{ID: "sales", Status: "loaded", Path: "/session/data/sales.parquet", Size: int64(len(parquet))},
			}
			if diff := cmp.Diff(want, d.list(), sometime); diff != "" || got.Path != want[1].Path || len(got.SHA256) != 64 {
				t.Errorf("%s %+v", diff, got)
			}
			look := "import os, pandas as pd; print(pd.read_parquet('/session/data/sales.parquet').x.sum(), open('/session/data/notes.txt').read(), sorted(os.listdir('/session/data')))"
			if got := d.prints(look); got != "42 hello ['notes.txt', 'sales.parquet']" {
				t.Errorf("a cell sees %s", got)
			}
			d.call(http.MethodPost, "/stop", nil, nil)
			d.stage("later.txt", "", strings.NewReader("sent while nothing ran"))
			if err := s.RemoveDataset(t.Context(), d.key, "notes.txt"); err != nil {
				t.Fatal(err)
			}
			d.open(api(c.storage))
			if got := d.prints("import os, pandas as pd; print(pd.read_parquet('/session/data/sales.parquet').x.sum(), sorted(os.listdir('/session/data')), open('/session/data/later.txt').read())"); got !=
				"42 ['later.txt', 'sales.parquet'] sent while nothing ran" {
				t.Errorf("the next sandbox sees %s", got)
			}
			if got := d.list()[0]; got.Path != "/session/data/later.txt" {
				t.Errorf("%+v", got)
			}
		})
	}
	t.Run("S4.87 datasets cannot be changed, left or run from inside", func(t *testing.T) {
		d := s.dataSession(t, "data-ro", api("disk"))
		d.stage("x.sh", "", strings.NewReader("#!/bin/sh\necho ran\n"))
		sb := &sandbox{t, s.Sandbox(d.open(api("disk")).Sandbox)}
		for claim, line := range map[string]string{
			"write": "echo x >> /session/data/x.sh", "chmod": "chmod 777 /datasets/x.sh", "unlink": "rm -f /datasets/x.sh", "mknod": "mknod /datasets/null c 1 3",
			"run": "/datasets/x.sh", "make": "touch /datasets/y", "leave": "ls /datasets/../ses_*", "remount": "mount -o remount,rw /datasets",
		} {
			for _, sudo := range []string{"", "sudo "} {
				out := sb.exec(client.ExecRequest{Argv: []string{"bash", "-c", sudo + "bash -c '" + line + "'"}})
				if out.ExitCode == 0 {
					t.Errorf("%scould %s: %s", sudo, claim, out.Stdout)
				}
			}
		}
		if got := d.prints("import errno\ntry: open('/session/data/x.sh', 'w')\nexcept OSError as e: print(errno.errorcode[e.errno])"); got != "EROFS" {
			t.Errorf("a write says %s", got)
		}
		if got := sb.sh("cat /datasets/x.sh; stat -c %U:%a /datasets/x.sh"); got != "#!/bin/sh\necho ran\nnobody:444" {
			t.Errorf("%s", got)
		}
	})
	t.Run("what the user has under that name stays, and the dataset is told elsewhere", func(t *testing.T) {
		d := s.dataSession(t, "data-mine", api("tmpfs"))
		d.prints("open('/session/data/mine.csv', 'w').write('mine')")
		if got := d.stage("mine.csv", "", strings.NewReader("theirs")); got.Path != "/datasets/mine.csv" {
			t.Errorf("%+v", got)
		}
		if got := d.prints("print(open('/session/data/mine.csv').read(), open('/datasets/mine.csv').read())"); got != "mine theirs" {
			t.Errorf("%s", got)
		}
	})
	t.Run("S4.69 S4.70 what is loaded is not fetched again, in another session neither, and is one inode", func(t *testing.T) {
		a, b := s.dataSession(t, "data-a", api("tmpfs")), s.dataSession(t, "data-b", api("disk"))
		mark := func(d *dataSession, req client.DatasetRequest) client.Dataset {
			t.Helper()
			got, err := s.MarkDataset(t.Context(), d.key, "shared", req)
			if err != nil {
				t.Fatal(err)
			}
			return *got
		}
		if got := mark(a, client.DatasetRequest{Status: "pending"}); got.Status != "pending" {
			t.Errorf("%+v", got)
		}
		first := a.stage("shared", "", strings.NewReader(strings.Repeat("rows\n", 1000)))
		if got := mark(a, client.DatasetRequest{Status: "pending"}); got.Status != "loaded" {
			t.Errorf("who would fetch it again hears %+v", got)
		}
		if got := mark(b, client.DatasetRequest{Status: "loaded", SHA256: first.SHA256}); got.Path != first.Path || got.Size != first.Size {
			t.Errorf("%+v", got)
		}
		inode := "import os; st = os.stat('/session/data/shared.parquet'); print(st.st_ino, st.st_dev, st.st_nlink)"
		if x, y := a.prints(inode), b.prints(inode); x != y || !strings.HasSuffix(x, " 3") {
			t.Errorf("two sessions see %s and %s", x, y)
		}
		if strings.Contains(a.prints("import os; print(os.listdir('/datasets'))"), "data-b") {
			t.Error("one session sees the other")
		}
	})
	t.Run("S4.71 a dataset that failed can be tried again, and the log tells both", func(t *testing.T) {
		d := s.dataSession(t, "data-failed", api("tmpfs"))
		if _, err := s.MarkDataset(t.Context(), d.key, "x", client.DatasetRequest{Status: "failed", Error: "no such table"}); err != nil {
			t.Fatal(err)
		}
		if got := d.list(); len(got) != 1 || got[0].Status != "failed" || got[0].Error != "no such table" {
			t.Errorf("%+v", got)
		}
		d.stage("x", "", strings.NewReader("rows"))
		if diff := cmp.Diff([]client.Dataset{{ID: "x", Status: "loaded", Path: "/session/data/x.parquet", Size: 4}}, d.list(), sometime); diff != "" {
			t.Error(diff)
		}
		if got := d.datasetEvents(); got != "dataset_failed x no such table; dataset_loaded x " {
			t.Errorf("the log says %q", got)
		}
	})
	t.Run("S4.52 D3 ids that read as paths are refused", func(t *testing.T) {
		d := s.dataSession(t, "data-names", api("tmpfs"))
		for _, id := range []string{"../x", "../../x", "a/b", ".x", "a b", strings.Repeat("a", 129)} {
			_, err := s.StageDataset(t.Context(), d.key, id, "", strings.NewReader("x"))
			refused(t, "id "+id, err, 400, "letters, digits")
			_, err = s.StageDataset(t.Context(), d.key, "ok", "../"+id, strings.NewReader("x"))
			refused(t, "file "+id, err, 400, "letters, digits")
		}
		_, err := s.StageDataset(t.Context(), "../x", "ok", "", strings.NewReader("x"))
		refused(t, "a key", err, 400, "")
	})
	t.Run("S4.73 S4.83 a session without datasets says so", func(t *testing.T) {
		d := s.dataSession(t, "data-none", client.SessionRequest{})
		if got := d.list(); len(got) != 0 {
			t.Errorf("%+v", got)
		}
		_, err := s.StageDataset(t.Context(), d.key, "x", "", strings.NewReader("x"))
		refused(t, "to stage", err, 409, "open it with datasets access api")
		if got := d.prints("import os; print(os.path.exists('/datasets'), os.path.exists('/data'))"); got != "False False" {
			t.Errorf("it sees %s", got)
		}
	})
	t.Run("S4.85 a listing runs no code in the session", func(t *testing.T) {
		d := s.dataSession(t, "data-list", api("tmpfs"))
		d.stage("x", "", strings.NewReader("x"))
		const names = "print(sorted(n for n in dir() if not n.startswith('_')), len(In))"
		before := strings.Replace(d.prints(names), " 2", " 3", 1) // the next cell is the next
		d.list()
		if after := d.prints(names); after != before {
			t.Errorf("%s, then %s", before, after)
		}
		var info client.SessionInfo
		if d.call(http.MethodGet, "", nil, &info); info.Runs != 2 {
			t.Errorf("%d runs", info.Runs)
		}
	})
	t.Run("a fork of the sandbox sees the same datasets", func(t *testing.T) {
		d := s.dataSession(t, "data-fork", api("disk"))
		d.stage("x.csv", "", strings.NewReader("rows"))
		forked, err := s.Sandbox(d.open(api("disk")).Sandbox).Fork(t.Context(), client.ForkRequest{Count: 1})
		if err != nil {
			t.Fatal(err)
		}
		sb := &sandbox{t, s.Sandbox(forked.Sandboxes[0].ID)}
		defer sb.kill()
		d.stage("later.csv", "", strings.NewReader("later"))
		if got := sb.sh("cat /session/data/x.csv; echo; ls /datasets; echo x > /datasets/y || echo no"); got != "rows\nlater.csv\nx.csv\nno" {
			t.Errorf("it sees %q", got)
		}
	})
	t.Run("nobody asks for that kind of mount", func(t *testing.T) {
		_, err := s.Create(t.Context(), client.CreateRequest{Mounts: []client.Mount{{Kind: "data", Source: "ses_x", Target: "/x", ReadOnly: true}}})
		refused(t, "a create", err, 400, "volume or host")
		d := s.dataSession(t, "data-kind", api("disk"))
		if got := s.after(t, d.open(api("disk")).Sandbox).Mounts; len(got) != 0 {
			t.Errorf("a sandbox shows %+v", got)
		}
	})
	t.Run("what a session had goes with it", func(t *testing.T) {
		d := s.dataSession(t, "data-gone", api("tmpfs"))
		got := d.stage("x", "", strings.NewReader("of one session only"))
		there := func() (n int) {
			_ = filepath.WalkDir(filepath.Join(s.dir, "server/datasets"), func(path string, e fs.DirEntry, err error) error {
				if err == nil && filepath.Base(path) == got.SHA256 {
					n++
				}
				return nil // what goes meanwhile is what is waited for
			})
			return n
		}
		if there() != 1 {
			t.Error("its content is not where it is looked for")
		}
		d.call(http.MethodDelete, "", nil, nil)
		eventually(t, "its content is gone", 2*time.Minute, func() bool { return there() == 0 })
	})
}

// datasetEvents is what the session's log says of datasets.
func (d *dataSession) datasetEvents() string {
	d.t.Helper()
	req, err := http.NewRequestWithContext(d.t.Context(), http.MethodGet, d.s.url+client.Prefix+"/sessions/"+d.key+"/log", nil)
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("X-API-Key", d.s.key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	var said []string
	for lines := json.NewDecoder(resp.Body); ; {
		var line client.SessionLogLine
		if err := lines.Decode(&line); err == io.EOF {
			return strings.Join(said, "; ")
		} else if err != nil {
			d.t.Fatal(err)
		}
		if strings.HasPrefix(line.Event, "dataset_") {
			said = append(said, line.Event+" "+line.Dataset+" "+line.Error)
		}
	}
}

func TestDatasetsOfTheHost(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "cove-datasets")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for name, text := range map[string]string{"b.parquet": "bb", "a.csv": "a", "c.txt": "ccc"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := newServer(t, "COVE_STORAGE_HOST_PATHS="+dir)
	for _, storage := range []string{"tmpfs", "bind"} {
		t.Run("S4.22 S4.23 S4.82 S4.84 S4.86 S4.87 a directory of the host is read-only at /data, with "+storage, func(t *testing.T) {
			req := localData(dir)
			req.Storage = storage
			d := s.dataSession(t, "local-"+storage, req)
			want := []client.Dataset{
				{ID: "a.csv", Status: "loaded", Path: "/data/a.csv", Size: 1}, {ID: "b", Status: "loaded", Path: "/data/b.parquet", Size: 2}, {ID: "c.txt", Status: "loaded", Path: "/data/c.txt", Size: 3},
			}
			got := d.list()
			if diff := cmp.Diff(want, got, sometime); diff != "" || got[0].UpdatedAt.IsZero() {
				t.Errorf("%s", diff)
			}
			if got := d.prints("import os, errno\nprint(open('/data/a.csv').read(), sorted(os.listdir('/data')))\ntry: open('/data/a.csv', 'w')\nexcept OSError as e: print(errno.errorcode[e.errno])"); got !=
				"a ['a.csv', 'b.parquet', 'c.txt']\nEROFS" {
				t.Errorf("a cell sees %s", got)
			}
			_, err := s.StageDataset(t.Context(), d.key, "x", "", strings.NewReader("x"))
			refused(t, "S4.73 to stage", err, 409, "put files into that directory")
		})
	}
	t.Run("S4.88 a path that is missing, not allowed or not given is told so that one can act", func(t *testing.T) {
		for words, path := range map[string]string{
			"storage.host_paths": "/etc", "the path of a directory": "", "is not there": dir + "/none", "plain absolute path": "lake", "not a directory": dir + "/a.csv",
		} {
			_, err := s.call(http.MethodPut, "/sessions/local-bad", localData(path), nil)
			if err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("%q: %v", path, err)
			}
		}
	})
	t.Run("S4.29 a session has both: files of the host, and what is staged", func(t *testing.T) {
		req := api("tmpfs")
		req.Datasets.Path = dir
		d := s.dataSession(t, "local-both", req)
		d.stage("x.csv", "", strings.NewReader("staged"))
		if got := d.prints("print(open('/data/a.csv').read(), open('/session/data/x.csv').read())"); got != "a staged" {
			t.Errorf("%s", got)
		}
	})
}

// slowly sends so many blocks and then waits until it is told to end.
type slowly struct {
	blocks int
	sent   chan struct{}
	end    chan struct{}
}

func (s *slowly) Read(p []byte) (int, error) {
	if s.blocks == 0 {
		close(s.sent)
	}
	if s.blocks--; s.blocks < 0 {
		<-s.end
		return 0, io.ErrUnexpectedEOF
	}
	return len(p), nil
}

func TestDatasetUploads(t *testing.T) {
	s := newServer(t)
	t.Run("S4.72 a large dataset streams through", func(t *testing.T) {
		d := s.dataSession(t, "upload-large", api("tmpfs"))
		d.stage("first", "", strings.NewReader("x"))
		before := s.peak(t, true)
		const size = 256 << 20
		if got := d.stage("large.bin", "", &zeros{size}); got.Size != size {
			t.Errorf("%+v", got)
		}
		if grown := s.peak(t, false) - before; grown > 32<<20 {
			t.Errorf("the server needed %d MB more for %d MB", grown>>20, size>>20)
		}
		if got := d.prints("import hashlib; print(hashlib.file_digest(open('/session/data/large.bin', 'rb'), 'sha256').hexdigest())"); got != d.list()[1].SHA256 {
			t.Errorf("inside it is %s", got)
		}
	})
	t.Run("a sender who leaves has failed, and leaves nothing", func(t *testing.T) {
		d := s.dataSession(t, "upload-left", api("tmpfs"))
		ctx, leave := context.WithCancel(t.Context())
		body := &slowly{blocks: 100, sent: make(chan struct{}), end: make(chan struct{})}
		done := make(chan error, 1)
		go func() {
			_, err := s.StageDataset(ctx, d.key, "x", "", body)
			done <- err
		}()
		<-body.sent
		d.arriving("x")
		leave()
		close(body.end)
		if err := <-done; err == nil {
			t.Error("it was staged")
		}
		eventually(t, "it has failed", 2*time.Minute, func() bool { return d.list()[0].Status == "failed" })
		s.nothingArrives(t)
		if got := d.prints("import os; print(os.listdir('/session/data'), os.listdir('/datasets'))"); got != "[] []" {
			t.Errorf("inside: %s", got)
		}
	})
	t.Run("kill -9 during an upload leaves nothing, and it can be sent again", func(t *testing.T) {
		d := s.dataSession(t, "upload-killed", api("disk"))
		d.stage("kept.csv", "", strings.NewReader("kept"))
		body := &slowly{blocks: 100, sent: make(chan struct{}), end: make(chan struct{})}
		done := make(chan error, 1)
		go func() {
			_, err := s.StageDataset(t.Context(), d.key, "x.csv", "", body)
			done <- err
		}()
		<-body.sent
		d.arriving("x.csv")
		s.crash(t)
		close(body.end)
		if err := <-done; err == nil {
			t.Error("it was staged")
		}
		s.start(t)
		want := []client.Dataset{
			{ID: "kept.csv", Status: "loaded", Path: "/session/data/kept.csv", Size: 4},
			{ID: "x.csv", Status: "failed", Error: "the server ended while it arrived: send it again"},
		}
		if diff := cmp.Diff(want, d.list(), sometime); diff != "" {
			t.Error(diff)
		}
		s.nothingArrives(t)
		d.stage("x.csv", "", strings.NewReader("again"))
		if got := d.prints("print(open('/session/data/kept.csv').read(), open('/session/data/x.csv').read())"); got != "kept again" {
			t.Errorf("the sandbox that lived on sees %s", got)
		}
	})
}

// arriving waits until the server has begun to take a dataset: what was sent may still be on its way.
func (d *dataSession) arriving(id string) {
	d.t.Helper()
	eventually(d.t, id+" is arriving", 2*time.Minute, func() bool {
		for _, one := range d.list() {
			if one.ID == id {
				return one.Status == "pending"
			}
		}
		return false
	})
}

func (s *server) nothingArrives(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(s.dir, "server/datasets/blobs/tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

package e2b_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

var _ e2b.Sandboxes = (*sandbox.Manager)(nil)

func TestEveryKindOfFailureHasAStatus(t *testing.T) {
	for _, kind := range fault.Kinds {
		if s := e2b.Status(kind); s < 400 || s == http.StatusInternalServerError && kind != fault.Internal {
			t.Errorf("%s is %d", kind, s)
		}
	}
}

func TestCreate(t *testing.T) {
	w := newWorld(t)
	t.Run("the newest create answers with everything that an SDK wants", func(t *testing.T) {
		begun := time.Now()
		sb := w.create(`{"templateID":"base","metadata":{"a":"b"},"envVars":{}}`)
		want := e2b.Sandbox{
			TemplateID: "base", SandboxID: sb.SandboxID, ClientID: "cove", EnvdVersion: "0.6.13", Alias: "base",
			EnvdToken: target.NewTokens(secret).Envd(sb.SandboxID),
		}
		if diff := cmp.Diff(want, sb); diff != "" {
			t.Error(diff)
		}
		d := w.detail(sb.SandboxID)
		if !since(begun, d.StartedAt, 0) || !since(begun, d.EndAt, 300*time.Second) {
			t.Errorf("it lives from %v to %v", d.StartedAt, d.EndAt)
		}
		d.StartedAt, d.EndAt = time.Time{}, time.Time{}
		wantDetail := e2b.Detail{
			Listed: e2b.Listed{
				TemplateID: "base", SandboxID: sb.SandboxID, ClientID: "cove", CPUCount: 2, MemoryMB: 512, DiskSizeMB: 1024,
				State: "running", EnvdVersion: "0.6.13", Alias: "base", Metadata: map[string]string{"a": "b"},
			},
			EnvdToken: want.EnvdToken, Lifecycle: e2b.Lifecycle{OnTimeout: "kill"},
		}
		if diff := cmp.Diff(wantDetail, d); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("an old create lives for 15 seconds", func(t *testing.T) {
		var sb e2b.Sandbox
		begun := time.Now()
		w.ask(http.StatusCreated, "POST", "/sandboxes", `{"templateID":"base"}`, &sb)
		if d := w.detail(sb.SandboxID); !since(begun, d.EndAt, 15*time.Second) {
			t.Errorf("%+v ends at %v", sb, d.EndAt)
		}
	})
	t.Run("processes find what E2B promises in their environment, and the caller's word is last", func(t *testing.T) {
		w.builder.start = nil
		sb := w.create(`{"templateID":"server","envVars":{"B":"caller","C":"caller"}}`)
		got := w.run(sb.SandboxID, `printf '%s ' $A $B $C $E2B_SANDBOX $E2B_TEMPLATE_ID $E2B_SANDBOX_ID`)
		if want := "template caller caller true tmpl1 " + sb.SandboxID + " "; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("a sandbox is answered when its template's start command is ready", func(t *testing.T) {
		w.builder.start = &build.Start{Command: "touch $HOME/begun; sleep 600", Ready: "test -f $HOME/begun && echo x >> $HOME/asked"}
		sb := w.create(`{"templateID":"server"}`)
		if got := w.run(sb.SandboxID, "cat $HOME/asked"); got != "x\n" {
			t.Errorf("ready said yes %q times", got)
		}
	})
	t.Run("lifecycle and network are shown as they were asked for", func(t *testing.T) {
		sb := w.create(`{"templateID":"base","timeout":60,"autoPause":true,"autoResume":{"enabled":true},"allow_internet_access":false,
			"network":{"allowOut":["8.8.8.8","1.1.1.0/24"],"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}","egressProxy":null}}`)
		d := w.detail(sb.SandboxID)
		if want := (e2b.Lifecycle{AutoResume: true, OnTimeout: "pause"}); d.Lifecycle != want || d.Internet == nil || *d.Internet {
			t.Errorf("lifecycle %+v, internet %v", d.Lifecycle, d.Internet)
		}
		want := `{"allowOut":["8.8.8.8","1.1.1.0/24"],"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}"}`
		if string(d.Network) != want {
			t.Errorf("network %s", d.Network)
		}
		if sb.TrafficToken == nil || *sb.TrafficToken != target.NewTokens(secret).Traffic(sb.SandboxID) {
			t.Errorf("traffic token %v", sb.TrafficToken)
		}
		inside, err := w.manager.Get(t.Context(), acme, sb.SandboxID)
		if err != nil || !inside.AutoResume || inside.ResumeLifetime != 300*time.Second || inside.DeadlineAction != sandbox.IdlePause || inside.ColdPause {
			t.Errorf("%+v, %v", inside, err)
		}
	})
	t.Run("a request under the same key makes one sandbox, and another request is told so", func(t *testing.T) {
		send := func(body string) reply { return w.send("POST", "/v2/sandboxes", body, "Idempotency-Key", "abc-1") }
		a, b := send(`{"templateID":"base"}`), send(`{"templateID":"base"}`)
		if a.status != http.StatusCreated || a.body != b.body {
			t.Errorf("%+v and %+v", a, b)
		}
		other := send(`{"templateID":"base","timeout":17}`)
		w.refused(other, http.StatusUnprocessableEntity)
		if !strings.Contains(other.body, `"error_code":"idempotency_request_mismatch"`) {
			t.Error(other.body)
		}
		w.refused(w.send("POST", "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "A B"), http.StatusBadRequest)
	})
	t.Run("a domain is told to SDKs when there is one", func(t *testing.T) {
		w := newWorld(t, func(c *e2b.Config, _ *sandbox.Config) { c.Domain = "sbx.example:8443" })
		sb := w.create(`{"templateID":"base"}`)
		if d := w.detail(sb.SandboxID); sb.Domain == nil || *sb.Domain != "sbx.example:8443" || d.Domain == nil {
			t.Errorf("%+v", sb)
		}
	})
}

// run runs a command in a sandbox and returns what it said.
func (w *world) run(id, line string) string {
	w.t.Helper()
	s, err := w.manager.Exec(w.t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sh", "-c", line}})
	if err != nil {
		w.t.Fatal(err)
	}
	defer s.Close()
	var out strings.Builder
	for event, err := range s.Events() {
		if err != nil {
			w.t.Fatal(err)
		}
		if event.Type == agentapi.EventStdout {
			out.Write(event.Data)
		}
	}
	return out.String()
}

func TestCreate_TemplateReplaced(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		built  []string
		status int
	}{
		"once":                      {[]string{"e2b-build-1", "base"}, http.StatusCreated},
		"twice":                     {[]string{"e2b-build-1", "e2b-build-2", "base"}, http.StatusCreated},
		"removed and nothing since": {[]string{"e2b-build-1"}, http.StatusNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			w.builder.built = c.built
			w.ask(c.status, "POST", "/v2/sandboxes", `{"templateID":"renamed"}`, nil)
		})
	}
}

func TestCreateRefuses(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		body   string
		status int
		says   string
	}{
		"no body":                      {``, 400, "templateID"},
		"no template":                  {`{}`, 400, "templateID"},
		"an unknown template":          {`{"templateID":"nope"}`, 404, "nope"},
		"a list":                       {`[]`, 400, "object"},
		"null":                         {`null`, 400, "object"},
		"half a body":                  {`{"templateID":"ba`, 400, "JSON"},
		"two bodies":                   {`{"templateID":"base"}{}`, 400, "JSON"},
		"a number for a name":          {`{"templateID":7}`, 400, "templateID"},
		"no time":                      {`{"templateID":"base","timeout":0}`, 400, "Timeout must be greater than 0"},
		"a negative time":              {`{"templateID":"base","timeout":-1}`, 400, "Timeout must be greater than 0"},
		"an absurd time":               {`{"templateID":"base","timeout":99999999999999}`, 400, "timeout"},
		"a long time":                  {`{"templateID":"base","timeout":1000000000}`, 400, "2592000"},
		"half a second":                {`{"templateID":"base","timeout":0.5}`, 400, "timeout"},
		"metadata that is no text":     {`{"templateID":"base","metadata":{"a":1}}`, 400, "metadata"},
		"a strange variable":           {`{"templateID":"base","envVars":{"a b":"c"}}`, 400, "a b"},
		"cold without pause":           {`{"templateID":"base","autoPauseMemory":false}`, 400, "autoPause"},
		"cold with auto-resume":        {`{"templateID":"base","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}`, 400, "autoResume"},
		"mcp":                          {`{"templateID":"base","mcp":{"github":{}}}`, 501, "MCP"},
		"iam":                          {`{"templateID":"base","iam":{"tokens":{"a":{"audience":"b"}}}}`, 501, "iam"},
		"volumes":                      {`{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}`, 501, "volumes"},
		"an egress proxy":              {`{"templateID":"base","network":{"egressProxy":{"address":"a:1"}}}`, 501, "egressProxy"},
		"header rules":                 {`{"templateID":"base","network":{"rules":{"a.example":[]}}}`, 501, "rules"},
		"ports with TLS":               {`{"templateID":"base","network":{"httpsPorts":[443]}}`, 501, "httpsPorts"},
		"a name that is denied":        {`{"templateID":"base","network":{"denyOut":["a.example"]}}`, 400, "denyOut"},
		"a name without the rest shut": {`{"templateID":"base","network":{"allowOut":["a.example"]}}`, 400, "0.0.0.0/0"},
		"a name":                       {`{"templateID":"base","network":{"allowOut":["*.a.example"],"denyOut":["0.0.0.0/0"]}}`, 501, "domain names"},
		"a private network":            {`{"templateID":"base","allow_internet_access":false,"network":{"allowOut":["192.168.1.1"]}}`, 400, "private"},
		"the metadata service":         {`{"templateID":"base","allow_internet_access":false,"network":{"allowOut":["169.254.169.254/32"]}}`, 400, "private"},
		"a mask with a line break":     {`{"templateID":"base","network":{"maskRequestHost":"a\r\nb"}}`, 400, "maskRequestHost"},
		"a broken network":             {`{"templateID":"base","network":{"allowOut":"1.1.1.1"}}`, 400, "allowOut"},
	} {
		t.Run(name+" is refused", func(t *testing.T) {
			if m := w.refused(w.send("POST", "/v2/sandboxes", c.body), c.status); !strings.Contains(m, c.says) {
				t.Errorf("it says %q, and nothing of %q", m, c.says)
			}
		})
	}
	t.Run("a longer time than the server allows is refused", func(t *testing.T) {
		w := newWorld(t, func(c *e2b.Config, d *sandbox.Config) { c.MaxLifetime, d.MaxLifetime = time.Hour, time.Hour })
		w.refused(w.send("POST", "/v2/sandboxes", `{"templateID":"base","timeout":3601}`), http.StatusBadRequest)
		w.create(`{"templateID":"base","timeout":3600}`)
	})
	t.Run("private traffic to an open sandbox is refused", func(t *testing.T) {
		w := newWorld(t, func(c *e2b.Config, _ *sandbox.Config) { c.OpenSandboxes = true })
		w.refused(w.send("POST", "/sandboxes", `{"templateID":"base","secure":false,"network":{"allowPublicTraffic":false}}`), http.StatusBadRequest)
	})
	t.Run("a body that is too large is refused", func(t *testing.T) {
		w.refused(w.send("POST", "/v2/sandboxes", `{"templateID":"`+strings.Repeat("x", 1<<20)+`"}`), http.StatusRequestEntityTooLarge)
	})
	t.Run("one over the limit is refused, and no SDK tries again", func(t *testing.T) {
		w := newWorld(t, func(_ *e2b.Config, c *sandbox.Config) { c.MaxPerTenant = 1 })
		w.create(`{"templateID":"base"}`)
		r := w.send("POST", "/v2/sandboxes", `{"templateID":"base"}`)
		w.refused(r, http.StatusTooManyRequests)
		if r.header.Get("Should-Retry") != "false" {
			t.Errorf("headers %v", r.header)
		}
	})
	if n := w.manager.Running(acme, ""); n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}

func TestWhoMayCall(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	for name, headers := range map[string][]string{
		"no key":      {"X-API-Key", ""},
		"a wrong key": {"X-API-Key", "e2b_" + strings.Repeat("0", 40)},
		"nonsense":    {"X-API-Key", "", "Authorization", "Basic abc"},
	} {
		t.Run(name+" is refused everywhere", func(t *testing.T) {
			for _, path := range []string{"/sandboxes/" + id, "/v2/sandboxes", "/snapshots", "/teams", "/templates", "/kruise/api/sandboxes"} {
				w.refused(w.send("GET", path, "", headers...), http.StatusUnauthorized)
			}
		})
	}
	t.Run("a key may come as a bearer", func(t *testing.T) {
		if r := w.send("GET", "/sandboxes/"+id, "", "X-API-Key", "", "Authorization", "Bearer "+w.key); r.status != http.StatusOK {
			t.Errorf("%+v", r)
		}
	})
	t.Run("another tenant's sandbox is not there", func(t *testing.T) {
		for _, c := range [][3]string{
			{"GET", "", ""}, {"DELETE", "", ""}, {"POST", "/timeout", `{"timeout":1}`}, {"POST", "/refreshes", ``}, {"POST", "/pause", ``},
			{"POST", "/resume", ``}, {"POST", "/connect", `{"timeout":1}`}, {"POST", "/fork", ``}, {"POST", "/snapshots", ``},
			{"PUT", "/network", `{}`}, {"GET", "/metrics", ""}, {"GET", "/logs", ""},
		} {
			for _, id := range []string{id, "nonexistingsandbox"} {
				w.refused(w.send(c[0], "/sandboxes/"+id+c[1], c[2], "X-API-Key", w.other), http.StatusNotFound)
			}
		}
		if d := w.detail(id); d.State != "running" {
			t.Errorf("it is %s", d.State)
		}
		r := w.send("GET", "/sandboxes/metrics?sandbox_ids="+id, "", "X-API-Key", w.other)
		if strings.TrimSpace(r.body) != `{"sandboxes":{}}` {
			t.Error(r.body)
		}
	})
	t.Run("an id may have a client's behind it, and must be one", func(t *testing.T) {
		w.detail(id + "-6532622b")
		w.refused(w.send("DELETE", "/sandboxes/an-id-that-never-was", ""), http.StatusNotFound)
		for _, wrong := range []string{"A", "a_b", "a-B", "-a", "a%2Fb", "%00", strings.Repeat("a", 65), "a-" + strings.Repeat("a", 200)} {
			w.refused(w.send("GET", "/sandboxes/"+wrong, ""), http.StatusBadRequest)
		}
	})
}

func TestLife(t *testing.T) {
	w := newWorld(t, func(c *e2b.Config, d *sandbox.Config) { c.MaxLifetime, d.MaxLifetime = 24*time.Hour, 24*time.Hour })
	t.Run("a sandbox is killed once", func(t *testing.T) {
		id := w.create(`{"templateID":"base"}`).SandboxID
		w.ask(http.StatusNoContent, "DELETE", "/sandboxes/"+id, "", nil)
		w.refused(w.send("DELETE", "/sandboxes/"+id, ""), http.StatusNotFound)
		w.refused(w.send("GET", "/sandboxes/"+id, ""), http.StatusNotFound)
	})
	t.Run("a timeout may shorten and lengthen, and is cut to what is allowed", func(t *testing.T) {
		id := w.create(`{"templateID":"base"}`).SandboxID
		for _, s := range []int{10, 1000, 1 << 30} {
			begun := time.Now()
			w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/timeout", fmt.Sprintf(`{"timeout":%d}`, s), nil)
			want := min(time.Duration(s)*time.Second, 24*time.Hour)
			if d := w.detail(id); !since(begun, d.EndAt, want) {
				t.Errorf("it ends at %v, want %v", d.EndAt, want)
			}
		}
		for _, body := range []string{`{}`, `{"timeout":-1}`, `{"timeout":"1"}`, ``} {
			w.refused(w.send("POST", "/sandboxes/"+id+"/timeout", body), http.StatusBadRequest)
		}
	})
	t.Run("a timeout of nothing ends it", func(t *testing.T) {
		id := w.create(`{"templateID":"base"}`).SandboxID
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/timeout", `{"timeout":0}`, nil)
		w.refused(w.send("GET", "/sandboxes/"+id, ""), http.StatusNotFound)
	})
	t.Run("or pauses it, if that was asked for", func(t *testing.T) {
		id := w.create(`{"templateID":"base","autoPause":true,"autoPauseMemory":false}`).SandboxID
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/timeout", `{"timeout":0}`, nil)
		if d := w.detail(id); d.State != "paused" || d.PauseMode != "filesystem" {
			t.Errorf("it is %s, %s", d.State, d.PauseMode)
		}
	})
	t.Run("a refresh and a connect only lengthen", func(t *testing.T) {
		id := w.create(`{"templateID":"base","timeout":300}`).SandboxID
		before := w.detail(id).EndAt
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/refreshes", `{"duration":10}`, nil)
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/refreshes", ``, nil)
		w.ask(http.StatusOK, "POST", "/sandboxes/"+id+"/connect", `{"timeout":1}`, nil)
		if after := w.detail(id).EndAt; !after.Equal(before) {
			t.Errorf("it ended at %v and ends at %v", before, after)
		}
		begun := time.Now()
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/refreshes", `{"duration":3600}`, nil)
		if after := w.detail(id).EndAt; !since(begun, after, time.Hour) {
			t.Errorf("it ends at %v", after)
		}
		begun = time.Now()
		w.ask(http.StatusOK, "POST", "/v2/sandboxes/"+id+"/connect", `{"timeout":7200}`, nil)
		if after := w.detail(id).EndAt; !since(begun, after, 2*time.Hour) {
			t.Errorf("it ends at %v", after)
		}
		w.refused(w.send("POST", "/sandboxes/"+id+"/refreshes", `{"duration":3601}`), http.StatusBadRequest)
		w.refused(w.send("POST", "/sandboxes/"+id+"/connect", ``), http.StatusBadRequest)
	})
}

func TestPause(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base","timeout":100}`).SandboxID
	t.Run("a pause is made once and shown", func(t *testing.T) {
		begun := time.Now()
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/pause", ``, nil)
		w.refused(w.send("POST", "/sandboxes/"+id+"/pause", `{}`), http.StatusConflict)
		if d := w.detail(id); d.State != "paused" || !since(begun, d.EndAt, 0) || d.PauseMode != "full" {
			t.Errorf("%+v", d)
		}
	})
	t.Run("a paused sandbox has no time to change and no network, and is not forked", func(t *testing.T) {
		w.refused(w.send("POST", "/sandboxes/"+id+"/timeout", `{"timeout":1}`), http.StatusNotFound)
		w.refused(w.send("POST", "/sandboxes/"+id+"/refreshes", ``), http.StatusNotFound)
		w.refused(w.send("PUT", "/sandboxes/"+id+"/network", `{}`), http.StatusConflict)
		w.refused(w.send("POST", "/sandboxes/"+id+"/fork", ``), http.StatusConflict)
	})
	t.Run("a connect resumes it, with the same token", func(t *testing.T) {
		var sb e2b.Sandbox
		begun := time.Now()
		w.ask(http.StatusCreated, "POST", "/v2/sandboxes/"+id+"/connect", `{"timeout":500}`, &sb)
		if d := w.detail(id); d.State != "running" || d.PauseMode != "" || !since(begun, d.EndAt, 500*time.Second) || d.EnvdToken != sb.EnvdToken {
			t.Errorf("%+v", d)
		}
		w.ask(http.StatusOK, "POST", "/v2/sandboxes/"+id+"/connect", ``, nil)
	})
	t.Run("a resume is for what is paused", func(t *testing.T) {
		w.refused(w.send("POST", "/sandboxes/"+id+"/resume", ``), http.StatusConflict)
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/pause", `{"memory":false,"requireHealthyGuest":true}`, nil)
		if d := w.detail(id); d.PauseMode != "filesystem" {
			t.Errorf("%+v", d)
		}
		var sb e2b.Sandbox
		begun := time.Now()
		w.ask(http.StatusCreated, "POST", "/sandboxes/"+id+"/resume", `{"timeout":70,"autoPause":true}`, &sb)
		if d := w.detail(id); sb.SandboxID != id || !since(begun, d.EndAt, 70*time.Second) {
			t.Errorf("%+v", d)
		}
	})
	t.Run("a connect without memory ends what ran", func(t *testing.T) {
		s, err := w.manager.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep", "600"}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/pause", ``, nil)
		w.ask(http.StatusCreated, "POST", "/v2/sandboxes/"+id+"/connect", `{"memory":false}`, nil)
		agent, err := w.manager.Agent(t.Context(), acme, id)
		if err != nil {
			t.Fatal(err)
		}
		if all, err := agent.Processes(t.Context()); len(all) != 0 || err != nil {
			t.Errorf("there run %v, %v", all, err)
		}
	})
	t.Run("a paused sandbox can be killed", func(t *testing.T) {
		w.ask(http.StatusNoContent, "POST", "/sandboxes/"+id+"/pause", ``, nil)
		w.ask(http.StatusNoContent, "DELETE", "/sandboxes/"+id, "", nil)
		w.refused(w.send("GET", "/sandboxes/"+id, ""), http.StatusNotFound)
	})
}

func TestFork(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base","metadata":{"a":"b"},"network":{"maskRequestHost":"x.example"}}`).SandboxID
	var out []map[string]json.RawMessage
	begun := time.Now()
	w.ask(http.StatusCreated, "POST", "/sandboxes/"+id+"/fork", `{"count":3,"timeout":40}`, &out)
	if len(out) != 3 {
		t.Fatalf("%d copies", len(out))
	}
	for _, f := range out {
		var sb e2b.Sandbox
		if err := json.Unmarshal(f["sandbox"], &sb); err != nil || f["error"] != nil {
			t.Fatalf("%v in %s", err, f)
		}
		d := w.detail(sb.SandboxID)
		if sb.EnvdToken == "" || d.Metadata["a"] != "b" || string(d.Network) != `{"maskRequestHost":"x.example"}` || !since(begun, d.EndAt, 40*time.Second) {
			t.Errorf("%+v", d)
		}
		if got := w.run(sb.SandboxID, "printf $E2B_SANDBOX_ID"); got != sb.SandboxID {
			t.Errorf("it calls itself %s", got)
		}
	}
	for _, body := range []string{`{"count":0}`, `{"count":101}`, `{"timeout":0}`, `{"count":"1"}`} {
		w.refused(w.send("POST", "/sandboxes/"+id+"/fork", body), http.StatusBadRequest)
	}
}

func TestForkStartsWhatItsTemplateStarts(t *testing.T) {
	w := newWorld(t)
	w.builder.start = &build.Start{Command: "echo begun >> $HOME/begun", Ready: "test -s $HOME/begun"}
	id := w.create(`{"templateID":"server"}`).SandboxID
	var out []e2b.Forked
	w.ask(http.StatusCreated, "POST", "/sandboxes/"+id+"/fork", `{"count":2}`, &out)
	for _, f := range out {
		if got := w.run(f.Sandbox.SandboxID, "cat $HOME/begun"); got != "begun\n" {
			t.Errorf("a copy says %q", got)
		}
	}
	w.builder.start = &build.Start{Command: "true", User: "nobody-of-that-name"}
	w.ask(http.StatusCreated, "POST", "/sandboxes/"+id+"/fork", `{"count":2}`, &out)
	for _, f := range out {
		if f.Error == nil || f.Error.Code == 0 || f.Error.Message == "" {
			t.Errorf("%+v", f)
		}
	}
	if n := w.manager.Running(acme, ""); n != 3 {
		t.Errorf("%d sandboxes run", n)
	}
}

// A sandbox without a token is open to everybody who knows its id, so only the operator and the caller together make one.
func TestCreateV1_Secure(t *testing.T) {
	for name, c := range map[string]struct {
		open   bool // the operator allows open sandboxes
		secure string
		token  bool
	}{
		"left out":                     {false, ``, true},
		"null":                         {false, `,"secure":null`, true},
		"asked for":                    {false, `,"secure":true`, true},
		"refused by the caller":        {false, `,"secure":false`, true},
		"left out, open ones allowed":  {true, ``, true},
		"null, open ones allowed":      {true, `,"secure":null`, true},
		"asked for, open ones allowed": {true, `,"secure":true`, true},
		"refused, open ones allowed":   {true, `,"secure":false`, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, func(cfg *e2b.Config, _ *sandbox.Config) { cfg.OpenSandboxes = c.open })
			for path, token := range map[string]bool{"/sandboxes": c.token, "/v2/sandboxes": true} {
				var sb e2b.Sandbox
				w.ask(http.StatusCreated, "POST", path, `{"templateID":"base"`+c.secure+`}`, &sb)
				d := w.detail(sb.SandboxID)
				if has := sb.EnvdToken != ""; has != token || d.EnvdToken != sb.EnvdToken {
					t.Errorf("%s: create has token %q, detail %q; want a token: %v", path, sb.EnvdToken, d.EnvdToken, token)
				}
			}
		})
	}
}

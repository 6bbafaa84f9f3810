package e2b_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/target"
)

func (w *world) logs(id, query string) (messages []string) {
	w.t.Helper()
	var out struct{ Logs []e2b.LogEntry }
	w.ask(http.StatusOK, "GET", "/v2/sandboxes/"+id+"/logs?"+query, "", &out)
	for _, e := range out.Logs {
		messages = append(messages, e.Message)
	}
	return messages
}

func TestLogs(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	at := time.Now().Add(time.Hour).Truncate(time.Second) // behind what happened to it
	say := w.api.Log(id)
	for i, level := range []string{"debug", "info", "warn", "error"} {
		say(target.Line{At: at.Add(time.Duration(i) * time.Second), Level: level, Logger: "process", Message: "it says " + level, Fields: map[string]string{"pid": "7"}})
	}
	all := []string{"sandbox: created", "sandbox: started", "it says debug", "it says info", "it says warn", "it says error"}
	backward := slices.Clone(all)
	slices.Reverse(backward)
	ms := func(d time.Duration) int64 { return at.Add(d).UnixMilli() }
	for query, want := range map[string][]string{
		"":                           all,
		"limit=2":                    all[:2],
		"limit=0":                    nil,
		"direction=backward":         backward,
		"direction=backward&limit=2": backward[:2],
		"level=warn":                 all[4:],
		"search=says+w":              all[4:5],
		fmt.Sprintf("cursor=%d", ms(time.Second)):                            all[3:],
		fmt.Sprintf("cursor=%d&direction=backward&limit=1", ms(time.Second)): all[3:4],
	} {
		t.Run("a log read with "+query, func(t *testing.T) {
			if got := w.logs(id, query); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
	t.Run("the CLI reads lines that are objects", func(t *testing.T) {
		var out struct {
			Logs       []e2b.LogText
			LogEntries []e2b.LogEntry
		}
		w.ask(http.StatusOK, "GET", fmt.Sprintf("/sandboxes/%s/logs?start=%d&limit=1", id, ms(2*time.Second)), "", &out)
		if len(out.Logs) != 1 || len(out.LogEntries) != 1 || !out.Logs[0].Timestamp.Equal(at.Add(2*time.Second)) {
			t.Fatalf("%+v", out)
		}
		var line map[string]string
		if err := json.Unmarshal([]byte(out.Logs[0].Line), &line); err != nil || line["level"] != "warn" || line["logger"] != "process" || line["pid"] != "7" {
			t.Errorf("%v, %v", line, err)
		}
	})
	t.Run("the log of an ended sandbox is still there, and says why it ended", func(t *testing.T) {
		w.ask(http.StatusNoContent, "DELETE", "/sandboxes/"+id, "", nil)
		if got := w.logs(id, "search=killed"); len(got) != 1 {
			t.Errorf("%q", got)
		}
		w.refused(w.send("GET", "/v2/sandboxes/"+id+"/logs", "", "X-API-Key", w.other), http.StatusNotFound)
	})
	for _, query := range []string{"limit=-1", "limit=1001", "cursor=x", "direction=up", "level=loud"} {
		w.refused(w.send("GET", "/v2/sandboxes/"+id+"/logs?"+query, ""), http.StatusBadRequest)
	}
	w.refused(w.send("GET", "/sandboxes/"+id+"/logs?start=-1", ""), http.StatusBadRequest)
}

func TestLogsAreBounded(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	say := w.api.Log(id)
	for i := range 5000 {
		say(target.Line{At: time.Now(), Level: "info", Message: fmt.Sprint(i)})
	}
	say(target.Line{At: time.Now(), Level: "error", Message: strings.Repeat("ü", 1<<20)})
	got := w.logs(id, "direction=backward&limit=3")
	if len(got) != 3 || len(got[0]) != 8<<10 || got[1] != "4999" {
		t.Errorf("%.40q", got)
	}
	long := strings.Repeat("x", 8<<10)
	for i := range 10_000 { // 80 MB of others
		w.api.Log(fmt.Sprint("other", i))(target.Line{At: time.Now(), Level: "info", Message: long})
	}
	if got := w.logs(id, "level=error"); len(got) != 0 {
		t.Errorf("the oldest log is still there among 10000: %.40q", got)
	}
}

func TestMetrics(t *testing.T) {
	w := newWorld(t)
	id := w.create(`{"templateID":"base"}`).SandboxID
	var all []map[string]any
	w.ask(http.StatusOK, "GET", "/sandboxes/"+id+"/metrics", "", &all)
	if len(all) == 0 {
		t.Fatal("a running sandbox has no figures")
	}
	for _, field := range []string{"timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed", "diskTotal"} {
		if all[0][field] == nil {
			t.Errorf("no %s in %v", field, all[0])
		}
	}
	if all[0]["memUsed"] != float64(5<<20) || all[0]["memTotal"] != float64(512<<20) || all[0]["cpuCount"] != float64(2) {
		t.Errorf("%v", all[0])
	}
	now := time.Now().Unix()
	w.ask(http.StatusOK, "GET", fmt.Sprintf("/sandboxes/%s/metrics?start=%d&end=%d", id, now-5, now), "", &all)
	if len(all) == 0 {
		t.Error("this second has no figures")
	}
	if r := w.ask(http.StatusOK, "GET", fmt.Sprintf("/sandboxes/%s/metrics?start=%d&end=%d", id, now-900, now-600), "", nil); r.body != "[]\n" {
		t.Errorf("before it was there: %s", r.body)
	}
	var some struct{ Sandboxes map[string]e2b.Metric }
	w.ask(http.StatusOK, "GET", "/sandboxes/metrics?sandbox_ids="+id+",unknown", "", &some)
	if len(some.Sandboxes) != 1 || some.Sandboxes[id].MemUsed != 5<<20 {
		t.Errorf("%+v", some)
	}
	for _, query := range []string{"/sandboxes/" + id + "/metrics?start=x", "/sandboxes/" + id + "/metrics?end=-1", "/sandboxes/metrics", "/sandboxes/metrics?sandbox_ids=A"} {
		w.refused(w.send("GET", query, ""), http.StatusBadRequest)
	}
}

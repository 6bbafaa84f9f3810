package telemetry_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/telemetry"
)

// metric is what a person must know to use one.
type metric struct {
	Type   string
	Labels string // in their order, with commas
}

// everything is a scrape of a server to which everything has happened.
func everything(t *testing.T) string {
	t.Helper()
	o := telemetry.New(quiet)
	o.Watch(sources())
	o.WatchSessions(func(context.Context) (map[string]int, error) { return map[string]int{"running": 1}, nil })
	sb := sandbox.Sandbox{ID: "a", Template: "python", Cause: sandbox.CauseKilled}
	o.Created(sb, 1, nil)
	o.Ended(sb)
	o.Forked(sb, 1, 1, 1, nil)
	o.Paused(sb, 1, nil)
	o.Resumed(sb, 1, nil)
	o.RunStarted(sb, sandbox.RunCell)
	o.RunEnded(sb, sandbox.RunCell, agentapi.OutcomeOK, 1)
	o.Failed(t.Context(), fault.New(fault.Gone, "gone"))
	o.Served(httptest.NewRequest("GET", "/x", nil), "", 200, 1, 1)
	return scrape(o)
}

var (
	typeLine   = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	helpLine   = regexp.MustCompile(`(?m)^# HELP (\S+) (.+)$`)
	labelNames = regexp.MustCompile(`([a-z_]+)="`)
)

// inCode are the metrics that the server has, by what it says.
func inCode(t *testing.T) map[string]metric {
	t.Helper()
	text := everything(t)
	helped := map[string]bool{}
	for _, m := range helpLine.FindAllStringSubmatch(text, -1) {
		helped[m[1]] = true
	}
	all := map[string]metric{}
	for _, m := range typeLine.FindAllStringSubmatch(text, -1) {
		name, kind := m[1], m[2]
		series := regexp.MustCompile(`(?m)^`+name+`(_bucket|_sum|_count)?(\{.*\})? \S+$`).FindAllStringSubmatch(text, -1)
		if !helped[name] || len(series) == 0 {
			t.Errorf("%s has no HELP or no series", name)
			continue
		}
		var labels []string
		for _, l := range labelNames.FindAllStringSubmatch(series[len(series)-1][2], -1) {
			labels = append(labels, l[1])
		}
		all[name] = metric{kind, strings.Join(labels, ", ")}
	}
	return all
}

func TestEveryMetricIsDocumentedAndEveryDocumentedMetricExists(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "observability.md"))
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]metric{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| (\\w+) \\| ([a-z_, ]*?) ?\\| .+ \\|$").FindAllStringSubmatch(string(text), -1) {
		documented[m[1]] = metric{m[2], m[3]}
	}
	if diff := cmp.Diff(documented, inCode(t)); diff != "" {
		t.Errorf("docs/observability.md and the code differ (-doc +code):\n%s", diff)
	}
}

// panel is one panel of a dashboard, or a row.
type panel struct {
	ID      int
	Type    string
	Title   string
	GridPos struct{ X, Y, W, H int }
	Targets []struct{ Expr string }
}

func dashboard(t *testing.T) (panels []panel, text string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "..", "deploy", "grafana", "cove.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Title         string
		UID           string
		SchemaVersion int
		Panels        []panel
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		t.Fatal(err)
	}
	if d.Title == "" || d.UID == "" || d.SchemaVersion < 36 {
		t.Errorf("no dashboard for Grafana 10: %q %q %d", d.Title, d.UID, d.SchemaVersion)
	}
	return d.Panels, string(raw)
}

var (
	metricInQuery = regexp.MustCompile(`\b((?:cove|process|go)_[a-z0-9_]+)`)
	matcher       = regexp.MustCompile(`([a-z_]+)(?:=~|!=|!~|=)"`)
	grouping      = regexp.MustCompile(`by \(([^)]*)\)`)
)

func TestTheDashboardAsksOnlyForWhatThereIs(t *testing.T) {
	code := inCode(t)
	panels, text := dashboard(t)
	// Those that Prometheus adds, and the one of histograms.
	added := []string{"job", "instance", "le"}
	asked := map[string]bool{}
	for _, p := range panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			labels := append([]string{}, added...)
			names := metricInQuery.FindAllString(target.Expr, -1)
			for _, name := range names {
				base := name
				for _, suffix := range []string{"_bucket", "_sum", "_count"} {
					if m, ok := code[strings.TrimSuffix(name, suffix)]; ok && m.Type == "histogram" {
						base = strings.TrimSuffix(name, suffix)
					}
				}
				m, ok := code[base]
				if !ok || m.Type == "histogram" && base == name {
					t.Errorf("panel %q asks for %s, which is no series of this server", p.Title, name)
				}
				if m.Type == "counter" && !strings.Contains(target.Expr, "rate(") {
					t.Errorf("panel %q shows the counter %s and not its rate", p.Title, name)
				}
				asked[base] = true
				labels = append(labels, strings.Split(m.Labels, ", ")...)
			}
			if len(names) == 0 {
				t.Errorf("panel %q asks for no metric: %s", p.Title, target.Expr)
			}
			used := []string{}
			for _, m := range matcher.FindAllStringSubmatch(target.Expr, -1) {
				used = append(used, m[1])
			}
			for _, m := range grouping.FindAllStringSubmatch(target.Expr, -1) {
				used = append(used, strings.Split(m[1], ", ")...)
			}
			for _, l := range used {
				if !slices.Contains(labels, l) {
					t.Errorf("panel %q uses the label %s, which its metrics do not have: %s", p.Title, l, target.Expr)
				}
			}
			if open, shut := strings.Count(target.Expr, "("), strings.Count(target.Expr, ")"); open != shut {
				t.Errorf("panel %q: %d parentheses open and %d close", p.Title, open, shut)
			}
		}
	}
	for _, name := range metricInQuery.FindAllString(text, -1) { // those of variables and annotations too
		trimmed := strings.TrimSuffix(name, "_bucket")
		if _, ok := code[trimmed]; !ok {
			t.Errorf("the dashboard names %s, which this server does not have", name)
		}
	}
	for name := range code {
		if !asked[name] && !strings.Contains(text, name) && !slices.Contains(unseen, name) {
			t.Errorf("no panel shows %s; add one, or name it in unseen with a reason", name)
		}
	}
}

// unseen are metrics that a graph of every day need not have.
var unseen = []string{
	"cove_adopted_total",   // once per restart
	"cove_maker_sandboxes", // differs from cove_sandboxes only while a server is away
}

func TestPanelsDoNotOverlapAndHaveNumbersOfTheirOwn(t *testing.T) {
	panels, _ := dashboard(t)
	ids := map[int]bool{}
	for i, p := range panels {
		if ids[p.ID] || p.Title == "" || p.GridPos.W < 1 || p.GridPos.H < 1 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q: %+v", p.Title, p)
		}
		ids[p.ID] = true
		for _, q := range panels[:i] {
			a, b := p.GridPos, q.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q overlap", p.Title, q.Title)
			}
		}
	}
	var rows []string
	for _, p := range panels {
		if p.Type == "row" {
			rows = append(rows, p.Title)
		}
	}
	want := []string{"Overview", "Creates", "Runs", "Live sandboxes", "Pools and zygotes", "Forks", "Pauses", "Sessions and what they leave", "Errors and requests", "Host"}
	if !slices.Equal(rows, want) {
		t.Errorf("rows %q, want %q", rows, want)
	}
}

package e2b

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/sandbox"
)

// maxLogs is how many lines one answer holds, and how many it holds when nobody says.
const maxLogs = 1000

// maxMillis is the last time that fits a clock of nanoseconds.
const maxMillis = math.MaxInt64 / 1_000_000

// LogEntry is one line of a sandbox's log.
type LogEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Message   string            `json:"message"`
	Level     string            `json:"level"`
	Fields    map[string]string `json:"fields"`
}

// LogText is the same line as the CLI reads it: an object in a string.
type LogText struct {
	Timestamp time.Time `json:"timestamp"`
	Line      string    `json:"line"`
}

// levels are in order: a reader who names one sees what is worse, too.
var levels = []string{"debug", "info", "warn", "error"}

func (a *API) logsV1(c *call) error {
	q := c.query()
	start, limit := q.integer("start", 0, 0, maxMillis), q.integer("limit", maxLogs, 0, maxLogs)
	if q.err != nil {
		return q.err
	}

	lines, err := a.lines(c)
	if err != nil {
		return err
	}

	lines = since(lines, start)
	lines = lines[:min(int(limit), len(lines))]
	texts, entries := make([]LogText, 0, len(lines)), make([]LogEntry, 0, len(lines))
	for _, line := range lines {
		entry := wireLine(line)
		entries = append(entries, entry)
		texts = append(texts, LogText{Timestamp: entry.Timestamp, Line: entry.text()})
	}
	return c.answer(http.StatusOK, map[string]any{"logs": texts, "logEntries": entries})
}

func (a *API) logsV2(c *call) error {
	q := c.query()
	limit, backward := q.integer("limit", maxLogs, 0, maxLogs), q.word("direction", "forward", "forward", "backward") == "backward"
	least, search := slices.Index(levels, q.word("level", levels[0], levels...)), q.Get("search")
	cursor := q.integer("cursor", -1, 0, maxMillis)
	if q.err != nil {
		return q.err
	}

	lines, err := a.lines(c)
	if err != nil {
		return err
	}

	switch {
	case backward && cursor >= 0:
		lines = until(lines, cursor)
	case cursor >= 0:
		lines = since(lines, cursor)
	}
	if backward {
		slices.Reverse(lines)
	}
	out := []LogEntry{}
	for _, line := range lines {
		if len(out) == int(limit) {
			break
		}
		entry := wireLine(line)
		if slices.Index(levels, entry.Level) >= least && strings.Contains(entry.Message, search) {
			out = append(out, entry)
		}
	}
	return c.answer(http.StatusOK, map[string]any{"logs": out})
}

// lines is the log of a sandbox, of one that has ended too: what happened to it and what was told of its processes.
func (a *API) lines(c *call) ([]target.Line, error) {
	if _, err := a.sandboxes.Get(c.ctx(), c.who, c.id); err != nil {
		return nil, err
	}
	lines := a.book.read(c.id)
	for event, err := range a.sandboxes.Events(c.ctx(), c.who, sandbox.EventQuery{Sandbox: c.id}) {
		if err != nil {
			return nil, err
		}
		lines = append(lines, eventLine(event))
	}
	slices.SortStableFunc(lines, func(x, y target.Line) int { return x.At.Compare(y.At) })
	return lines, nil
}

func since(lines []target.Line, ms int64) []target.Line {
	return slices.DeleteFunc(lines, func(l target.Line) bool { return l.At.UnixMilli() < ms })
}

func until(lines []target.Line, ms int64) []target.Line {
	return slices.DeleteFunc(lines, func(l target.Line) bool { return l.At.UnixMilli() > ms })
}

// eventLine says a lifecycle event as a line.
func eventLine(e sandbox.LifecycleEvent) target.Line {
	line := target.Line{At: e.At, Level: "info", Logger: "sandbox", Fields: map[string]string{"event": string(e.Type)}}
	line.Message = "sandbox: " + strings.ReplaceAll(string(e.Type), "_", " ")
	if e.Cause != "" {
		line.Fields["cause"] = string(e.Cause)
		line.Message += " (" + string(e.Cause) + ")"
	}
	if e.Message != "" {
		line.Message += ": " + e.Message
	}
	return line
}

func wireLine(line target.Line) LogEntry {
	fields := maps.Clone(line.Fields)
	if fields == nil {
		fields = map[string]string{}
	}
	fields["logger"] = cmp.Or(line.Logger, "sandbox")
	level := line.Level
	if !slices.Contains(levels, level) {
		level = "info"
	}
	return LogEntry{Timestamp: line.At.UTC(), Message: line.Message, Level: level, Fields: fields}
}

func (e LogEntry) text() string {
	object := maps.Clone(e.Fields)
	object["level"], object["message"] = e.Level, e.Message
	b, err := json.Marshal(object)
	if err != nil {
		return `{"level":"error","logger":"sandbox","message":"this line cannot be shown"}`
	}
	return string(b)
}

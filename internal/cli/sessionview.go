package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/client"
)

// The files of a session, in the form in which the server keeps them.
const (
	sessionLogFile      = "session.log"
	sessionMetadataFile = "session_metadata.json"
	sessionStateFile    = "python_state.json"
	sessionArtifactsDir = "artifacts"
)

// sessionView is a session as a person reads it.
type sessionView struct {
	Source    string                  `json:"source"`
	Metadata  map[string]any          `json:"metadata"` // as in its file
	Log       []client.SessionLogLine `json:"log"`
	Damaged   int                     `json:"damaged_lines,omitempty"`
	State     *client.SessionState    `json:"state,omitempty"`
	Artifacts []viewedFile            `json:"artifacts,omitempty"`

	noState, noArtifacts bool
}

// viewedFile is a file that a session left.
type viewedFile struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
	MIME string `json:"mime,omitempty"`
	ID   string `json:"id,omitempty"`
	Cell int    `json:"cell,omitempty"`
}

// askSession reads a session from the server.
func (a *invocation) askSession(ctx context.Context, key string, last int, noState, noArtifacts bool) (*sessionView, error) {
	cl, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	info, err := cl.GetSession(ctx, key)
	if err != nil {
		return nil, err
	}
	view := &sessionView{Source: key, Metadata: sessionMetadata(info), Log: []client.SessionLogLine{}}
	for line, err := range cl.SessionLog(ctx, key, client.SessionLogRequest{Last: last}) {
		if err != nil {
			return nil, err
		}
		view.Log = append(view.Log, line)
	}
	if !noState {
		if view.State, err = cl.SessionState(ctx, key); err != nil {
			return nil, err
		}
	}
	if noArtifacts {
		return view, nil
	}
	for art, err := range cl.Artifacts(ctx, client.ArtifactsRequest{Session: key}) {
		if err != nil {
			return nil, err
		}
		view.Artifacts = append(view.Artifacts, viewedFile{Path: art.Path, Size: art.Size, MIME: art.MIME, ID: art.ID, Cell: art.Cell})
	}
	slices.Reverse(view.Artifacts) // oldest first, as the log
	return view, nil
}

// sessionMetadata is a session in the form of its file.
func sessionMetadata(s *client.SessionInfo) map[string]any {
	m := map[string]any{
		"session_id": s.Key, "id": s.ID, "state": s.State, "created_at": s.CreatedAt, "container_id": s.Sandbox, "generation": s.Generation,
		"session_storage": s.Storage, "size_bytes": s.SizeBytes, "dataset_access": s.Datasets.Access, "template": s.Template, "image": s.Template,
		"execution_count": s.Runs, "failed_count": s.Failed, "artifact_count": s.Artifacts,
	}
	if !s.LastUsed.IsZero() {
		m["last_used"] = s.LastUsed
	}
	if !s.StoppedAt.IsZero() {
		m["stopped_at"], m["final_execution_count"] = s.StoppedAt, s.Runs
	}
	if s.Lost != nil {
		m["lost"] = s.Lost
	}
	if len(s.Metadata) > 0 {
		m["metadata"] = s.Metadata
	}
	if s.IdleTimeoutSeconds > 0 {
		m["idle_timeout_seconds"] = s.IdleTimeoutSeconds
	}
	return plainValues(m)
}

// plainValues is a map as JSON gives it back, so that a session of the server and one of a directory look the same.
func plainValues(m map[string]any) map[string]any {
	text, err := json.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("a session is plain data: %v", err))
	}
	var out map[string]any
	if err := json.Unmarshal(text, &out); err != nil {
		panic(fmt.Sprintf("JSON reads what JSON wrote: %v", err))
	}
	return out
}

// maxViewed bounds a file of a session that is read whole.
const maxViewed = 64 << 20

// readSession reads a session from a directory. What is missing there is missing in the view; lines that are no JSON are counted.
func readSession(dir string, noArtifacts bool) (*sessionView, error) {
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	view := &sessionView{Source: absolute, Log: []client.SessionLogLine{}}
	if _, err := readJSON(filepath.Join(dir, sessionMetadataFile), &view.Metadata); err != nil {
		return nil, err
	}
	var state loggedState
	if found, err := readJSON(filepath.Join(dir, sessionStateFile), &state); err != nil {
		return nil, err
	} else if found {
		view.State = &state.SessionState
	}
	if err := view.readLog(filepath.Join(dir, sessionLogFile)); err != nil {
		return nil, err
	}
	if noArtifacts {
		return view, nil
	}
	return view, view.readArtifacts(filepath.Join(dir, sessionArtifactsDir))
}

// readJSON reads a file that may not be there.
func readJSON(path string, into any) (found bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := json.NewDecoder(io.LimitReader(f, maxViewed)).Decode(into); err != nil {
		return false, fmt.Errorf("%s is damaged: %w", path, err)
	}
	return true, nil
}

func (v *sessionView) readLog(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	r := bufio.NewReader(f)
	for {
		text, err := r.ReadBytes('\n')
		if text = bytes.TrimSpace(text); len(text) > 0 {
			var line loggedLine
			if json.Unmarshal(text, &line) == nil && line.Event != "" {
				v.Log = append(v.Log, line.SessionLogLine)
			} else {
				v.Damaged++
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// loggedLine is a line of any writer's, and loggedState a state.
type (
	loggedLine  struct{ client.SessionLogLine }
	loggedState struct{ client.SessionState }
)

func (l *loggedLine) UnmarshalJSON(text []byte) error {
	type plain client.SessionLogLine
	var line struct {
		plain
		Time string `json:"timestamp"`
	}
	err := json.Unmarshal(text, &line)
	l.SessionLogLine = client.SessionLogLine(line.plain)
	l.Time = timeOf(line.Time)
	return err
}

func (s *loggedState) UnmarshalJSON(text []byte) error {
	type plain client.SessionState
	var state struct {
		plain
		Time string `json:"timestamp"`
	}
	err := json.Unmarshal(text, &state)
	s.SessionState = client.SessionState(state.plain)
	s.Time = timeOf(state.Time)
	return err
}

// timeOf is a time of any writer's: one without a zone is of the reader's own; what cannot be read is none.
func timeOf(text string) time.Time {
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.999999999"} {
		if at, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return at
		}
	}
	return time.Time{}
}

// readArtifacts lists what lies in a directory, links as what they are.
func (v *sessionView) readArtifacts(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, path)
		v.Artifacts = append(v.Artifacts, viewedFile{Path: filepath.ToSlash(relative), Size: info.Size()})
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// show writes a session for a person.
func (v *sessionView) show(w io.Writer, colour bool) error {
	var b strings.Builder
	b.WriteString(v.Source + "\n" + strings.Repeat("=", 50) + "\n")
	v.showMetadata(&b, colour)
	v.showLog(&b, colour)
	if !v.noState {
		v.showState(&b, colour)
	}
	if !v.noArtifacts {
		v.showArtifacts(&b, colour)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func section(b *strings.Builder, title string, colour bool) {
	b.WriteString("\n" + paint("=== "+title+" ===", bold, colour) + "\n")
}

// metadataLabels are what of a session's metadata is shown, in this order.
var metadataLabels = []struct{ name, label string }{
	{"session_id", "Session ID"}, {"state", "State"}, {"created_at", "Created"}, {"last_used", "Last Used"}, {"stopped_at", "Stopped"},
	{"container_id", "Sandbox"}, {"generation", "Generation"}, {"host_port", "Host Port"}, {"session_storage", "Storage Mode"},
	{"dataset_access", "Dataset Access"}, {"image", "Image"}, {"execution_count", "Execution Count"},
	{"final_execution_count", "Final Execution Count"}, {"failed_count", "Failed"}, {"artifact_count", "Artifacts"}, {"lost", "Lost"},
}

func (v *sessionView) showMetadata(b *strings.Builder, colour bool) {
	section(b, "SESSION METADATA", colour)
	if len(v.Metadata) == 0 {
		b.WriteString("No session metadata found\n")
		return
	}
	t := &table{}
	for _, l := range metadataLabels {
		if value, ok := v.Metadata[l.name]; ok && value != nil {
			t.row(l.label+":", metadataText(l.name, value))
		}
	}
	b.WriteString(strings.Join(t.lines(0, colour), "\n") + "\n")
}

func metadataText(name string, value any) string {
	switch x := value.(type) {
	case map[string]any: // how a sandbox was lost
		text := fmt.Sprintf("sandbox %v: %v", x["sandbox"], x["cause"])
		if message, ok := x["message"].(string); ok && message != "" {
			text += " (" + message + ")"
		}
		return text
	case string:
		if at, err := time.Parse(time.RFC3339Nano, x); err == nil && name != "session_id" {
			return stamp(at)
		}
		return x
	}
	return fmt.Sprint(value)
}

// stamp is a moment as a log shows it.
func stamp(at time.Time) string { return at.Format("2006-01-02 15:04:05.000 MST") }

func (v *sessionView) showLog(b *strings.Builder, colour bool) {
	section(b, "SESSION LOG", colour)
	if v.Damaged > 0 {
		fmt.Fprintf(b, "%s skipped: not JSON\n", count(v.Damaged, "damaged line", "damaged lines"))
	}
	if len(v.Log) == 0 {
		b.WriteString("No log entries found\n")
		return
	}
	for i := range v.Log {
		b.WriteString(logEntry(&v.Log[i], colour))
	}
}

// How much of a cell an entry shows.
const (
	codeShown   = 100
	outputShown = 200
	filesShown  = 3
)

// logEntry is one line of a log for a person.
func logEntry(l *client.SessionLogLine, colour bool) string {
	var b strings.Builder
	b.WriteString(paint("["+stamp(l.Time)+"]", dim, colour) + " " + l.Event)
	switch l.Event {
	case "code_execution":
		showCell(&b, l, colour)
	case "artifacts_created":
		showFiles(&b, l)
	default:
		showFacts(&b, l)
	}
	return b.String()
}

func showCell(b *strings.Builder, l *client.SessionLogLine, colour bool) {
	mark := paint("✗", red, colour)
	if l.Success != nil && *l.Success {
		mark = paint("✓", green, colour)
	}
	b.WriteString(costs(l) + "\n")
	part(b, mark, preview(l.Code, codeShown))
	if l.Stdout != "" {
		part(b, "Output:", preview(l.Stdout, outputShown))
	}
	if l.Result != "" {
		part(b, "Result:", preview(l.Result, outputShown))
	}
	if l.Stderr != "" {
		part(b, "Stderr:", preview(l.Stderr, outputShown))
	}
	if l.Error != "" {
		part(b, "Error:", preview(lastLines(l.Error), outputShown))
	}
	if l.Message != "" && l.Message != l.Error {
		part(b, "Note:", preview(l.Message, outputShown))
	}
}

// costs is how a cell ended and what it took.
func costs(l *client.SessionLogLine) string {
	var all []string
	if l.Cell > 0 {
		all = append(all, fmt.Sprintf("cell %d", l.Cell))
	}
	if l.Outcome != "" && l.Outcome != "ok" {
		all = append(all, l.Outcome)
	}
	if l.DurationMS > 0 {
		all = append(all, fmt.Sprintf("%.1f ms", l.DurationMS))
	}
	if l.CPUMS > 0 {
		all = append(all, fmt.Sprintf("cpu %.1f ms", l.CPUMS))
	}
	if l.PeakBytes > 0 {
		all = append(all, "peak "+size(l.PeakBytes))
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, ", ") + ")"
}

// lastLines is the end of a traceback, which says most.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "\n")
}

// part writes a labelled text; what goes on over lines stays below where it began.
func part(b *strings.Builder, label, text string) {
	indent := strings.Repeat(" ", 4+visible(label)+1)
	text = strings.ReplaceAll(strings.TrimRight(text, "\n"), "\t", "    ")
	for i, line := range strings.Split(text, "\n") {
		if i == 0 {
			b.WriteString("    " + label + " " + clean(line) + "\n")
			continue
		}
		b.WriteString(strings.TrimRight(indent+clean(line), " ") + "\n")
	}
}

// visible is how wide a label is without its colours.
func visible(label string) int {
	if strings.HasPrefix(label, "\x1b") {
		return 1
	}
	return utf8.RuneCountInString(label)
}

// preview is the beginning of a text.
func preview(text string, n int) string {
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n]) + "..."
}

func showFiles(b *strings.Builder, l *client.SessionLogLine) {
	fmt.Fprintf(b, " (%s)\n", count(max(l.Count, len(l.Artifacts)), "file", "files"))
	for i, f := range l.Artifacts {
		if i == filesShown {
			fmt.Fprintf(b, "    ... and %d more\n", len(l.Artifacts)-filesShown)
			break
		}
		text := fmt.Sprintf("%s (%s, %d bytes)", f.Name, cmp.Or(f.MIME, "unknown"), f.Size)
		if f.Error != "" {
			text += " not kept: " + f.Error
		}
		part(b, "-", text)
	}
}

// showFacts tells the rest of the events: what began, ended or was brought.
func showFacts(b *strings.Builder, l *client.SessionLogLine) {
	b.WriteString("\n")
	for _, fact := range []struct{ label, text string }{
		{"Sandbox:", l.Sandbox}, {"Dataset:", l.Dataset}, {"SHA-256:", l.SHA256}, {"Checkpoint:", l.Checkpoint},
		{"Cause:", l.Cause}, {"Message:", l.Message}, {"Error:", l.Error},
	} {
		if fact.text != "" {
			part(b, fact.label, preview(fact.text, outputShown))
		}
	}
	if ended := l.Event == "session_stopped" || l.Event == "sandbox_lost"; ended {
		part(b, "Cells:", fmt.Sprintf("%d, %d failed", l.Runs, l.Failed)+strings.Replace(costs(l), " (", " (alive ", 1))
	}
}

// modulesShown is how many modules are named.
const modulesShown = 20

func (v *sessionView) showState(b *strings.Builder, colour bool) {
	section(b, "PYTHON STATE", colour)
	if v.State == nil {
		b.WriteString("No Python state found\n")
		return
	}
	fmt.Fprintf(b, "Captured: %s\n", stamp(v.State.Time))
	if len(v.State.Variables) == 0 {
		b.WriteString("No variables\n")
	} else {
		b.WriteString("Variables:\n")
	}
	for _, name := range slices.Sorted(maps.Keys(v.State.Variables)) {
		one := v.State.Variables[name]
		part(b, name+":", one.Type+" = "+preview(one.Value, outputShown))
	}
	if v.State.Truncated {
		b.WriteString("    ... and more\n")
	}
	modules := slices.Sorted(slices.Values(v.State.Modules))
	if len(modules) == 0 {
		return
	}
	text := strings.Join(modules[:min(len(modules), modulesShown)], ", ")
	if more := len(modules) - modulesShown; more > 0 {
		text += fmt.Sprintf(", ... and %d more", more)
	}
	b.WriteString("Modules: " + clean(text) + "\n")
}

func (v *sessionView) showArtifacts(b *strings.Builder, colour bool) {
	section(b, "ARTIFACTS", colour)
	if len(v.Artifacts) == 0 {
		b.WriteString("No artifacts found\n")
		return
	}
	for _, f := range v.Artifacts {
		text := fmt.Sprintf("%s (%d bytes)", f.Path, f.Size)
		if f.ID != "" {
			text += fmt.Sprintf("  %s  %s, cell %d", f.MIME, f.ID, f.Cell)
		}
		b.WriteString(clean(text) + "\n")
	}
}

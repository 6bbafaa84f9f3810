package session

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
)

// What is kept of a run for a retry. Whoever runs code can tell as many events of any kind as an agent lets through, so each counts,
// with everything that it holds.
const (
	maxAnswer   = 4 << 20 // of what it told, and as much again of the files that it left
	maxStored   = 8 << 20 // of all of it, as it is stored: what needs escaping is longer there
	eventCost   = 256     // beside the text of an event or a file
	notKept     = "a part of what this run told is not kept"
	maxVariable = 500 // and what a kernel may say that it holds
	maxModules  = 2000
	maxName     = 256
	maxType     = 128
	maxValue    = 4000 // a thousand characters
)

// recorder hears a run for its log and, where a retry may come, to tell it again. Its memory is bounded.
type recorder struct {
	keep    bool // for a retry
	started bool
	end     agentapi.End
	late    []agentapi.Event // to be told before the end

	stdout, stderr bytes.Buffer
	failure        string
	result         string
	truncated      bool

	events []agentapi.Event
	size   int
	full   bool
}

func (r *recorder) add(e agentapi.Event) {
	switch e.Type {
	case agentapi.EventStarted:
		r.started = true
	case agentapi.EventStdout:
		r.take(&r.stdout, e.Data)
	case agentapi.EventStderr:
		r.take(&r.stderr, e.Data)
	case agentapi.EventError:
		if e.Error != nil {
			r.failure, r.truncated = r.clip(strings.Join(e.Error.Traceback, "\n"), maxLogOutput)
		}
	case agentapi.EventResult:
		if text := plain(e.Result); text != "" {
			r.result, r.truncated = r.clip(text, maxLogResult)
		}
	case agentapi.EventNotice, agentapi.EventFile, agentapi.EventReady, agentapi.EventEnd, agentapi.EventSynced, agentapi.EventBranch, EventArtifact:
	}
	if r.keep {
		r.remember(e)
	}
}

func (r *recorder) clip(s string, n int) (string, bool) {
	short, cut := clip(strings.ToValidUTF8(s, "\uFFFD"), n)
	return strings.Clone(short), cut || r.truncated // a part would keep all of it in memory
}

func (r *recorder) take(b *bytes.Buffer, data []byte) {
	if room := maxLogOutput - b.Len(); len(data) > room {
		data, r.truncated = data[:room], true
	}
	b.Write(data)
}

// plain is the text of a cell's value.
func plain(result *agentapi.Result) (text string) {
	if result == nil || !result.Main {
		return ""
	}
	_ = json.Unmarshal(result.Data["text/plain"], &text) // absent: none
	return text
}

// notice tells something beside what the cell told.
func (r *recorder) notice(message string) {
	e := agentapi.Event{Type: agentapi.EventNotice, Time: now(), Message: message}
	r.late = append(r.late, e)
	if r.keep {
		r.events = append(r.events, e)
	}
}

// remember keeps an event for a retry, and none after the first for which there is no room; output that follows on output is one.
func (r *recorder) remember(e agentapi.Event) {
	n := len(r.events)
	follows := n > 0 && len(e.Data) > 0 && r.events[n-1].Type == e.Type
	cost := len(e.Data)
	if !follows {
		cost = costOf(&e)
	}
	if r.full = r.full || r.size+cost > maxAnswer; r.full {
		return
	}
	r.size += cost
	if follows {
		r.events[n-1].Data = append(r.events[n-1].Data, e.Data...)
		return
	}
	e.Data = slices.Clone(e.Data) // the reader's buffer
	r.events = append(r.events, e)
}

// costOf is what an event takes in memory, about.
func costOf(e *agentapi.Event) int {
	n := eventCost + len(e.Data) + len(e.Message) + len(e.ID)
	if e.Result != nil {
		n += len(e.Result.ID)
		for _, m := range []map[string]json.RawMessage{e.Result.Data, e.Result.Metadata} {
			for k, v := range m {
				n += eventCost + len(k) + len(v)
			}
		}
	}
	if e.Error != nil {
		n += len(e.Error.Name) + len(e.Error.Value)
		for _, line := range e.Error.Traceback {
			n += eventCost/8 + len(line)
		}
	}
	return n
}

// someFiles are as many of a run's files as are kept for a retry.
func someFiles(files []artifact.Artifact) []artifact.Artifact {
	left := maxAnswer
	for i := range files {
		f := &files[i]
		left -= eventCost + len(f.Name) + len(f.Path) + len(f.MIME) + len(f.Source) + len(f.Error) + len(f.Key) + len(f.ToolCall)
		if left < 0 {
			return files[:i]
		}
	}
	return files
}

// answer is a run as it is told again.
type answer struct {
	Events    []agentapi.Event    `json:"events"`
	Artifacts []artifact.Artifact `json:"artifacts,omitempty"`
	End       agentapi.End        `json:"end"`
	Fault     *agentapi.Fault     `json:"fault,omitempty"`
}

func (r *recorder) answer(files []artifact.Artifact, failed error) []byte {
	a := answer{Events: r.events, Artifacts: someFiles(files), End: r.end}
	a.End.Value = nil // what the kernel held is its session's
	if failed != nil {
		a.Fault = &agentapi.Fault{Kind: fault.KindOf(failed), Message: fault.Message(failed)}
	}
	lacks := agentapi.Event{Type: agentapi.EventNotice, Time: now(), Message: notKept}
	if r.full || len(a.Artifacts) < len(files) {
		a.Events = append(a.Events, lacks)
	}
	text, err := json.Marshal(a)
	if err == nil && len(text) > maxStored { // how it ended is still known
		a.Events, a.Artifacts = []agentapi.Event{{Type: agentapi.EventStarted, Time: now()}, lacks}, nil
		text, err = json.Marshal(a)
	}
	if err != nil {
		return nil // told to a retry as an answer that is not kept
	}
	return text
}

func (a answer) tell(run string, t *teller) error {
	for _, e := range a.Events {
		told := Event{Event: e}
		if e.Type == agentapi.EventStarted {
			told.Run, told.Replayed = run, true
		}
		if !t.tell(told) {
			return nil
		}
	}
	if a.Fault != nil {
		return fault.New(a.Fault.Kind, "%s", a.Fault.Message)
	}
	for i := range a.Artifacts {
		if !t.tell(Event{Event: agentapi.Event{Type: EventArtifact}, Artifact: &a.Artifacts[i]}) {
			return nil
		}
	}
	t.tell(Event{Event: agentapi.Event{Type: agentapi.EventEnd, Time: now(), End: &a.End}})
	return nil
}

// line is a run as the log tells it.
func (r *recorder) line(run Run, spec RunSpec, failed error) LogLine {
	success := failed == nil && r.end.Outcome == agentapi.OutcomeOK
	code := exitCode(r.end, success)
	line := LogLine{
		Event: LogExecution, Sandbox: run.Sandbox, Run: run.ID, Cell: run.Cell, ToolCall: run.ToolCall, Code: run.Code, Success: &success,
		Stdout: text(&r.stdout), Stderr: text(&r.stderr), Error: r.failure, Result: r.result,
		Truncated: r.truncated || len(run.Code) < len(spec.Code), Timeout: float64(spec.TimeoutMS) / 1e3, Outcome: run.Outcome,
		ExitCode: &code, DurationMS: r.end.Usage.WallMS, CPUMS: r.end.Usage.CPUMS, PeakBytes: r.end.Usage.PeakBytes, Message: r.end.Message,
	}
	if line.DurationMS == 0 {
		line.DurationMS = float64(run.Ended.Sub(run.Started).Microseconds()) / 1e3
	}
	if failed != nil {
		line.Message = fault.Message(failed)
	}
	if line.Error == "" && !success {
		line.Error = line.Message
	}
	return line
}

func text(b *bytes.Buffer) string { return strings.ToValidUTF8(b.String(), "\uFFFD") }

// exitCode is that of the process, where there was one that ended, and otherwise what a program would have had.
func exitCode(end agentapi.End, success bool) int {
	if !success && end.ExitCode == 0 {
		return 1
	}
	return end.ExitCode
}

// PythonState is what a session's kernel held after its last cell.
type PythonState struct {
	Time      time.Time                    `json:"timestamp"`
	Variables map[string]agentapi.Variable `json:"variables"`
	Modules   []string                     `json:"imported_modules"`
	Truncated bool                         `json:"truncated,omitempty"`
}

// bare is a state that tells only when it was and that there was more.
func (s PythonState) bare() PythonState {
	return PythonState{Time: s.Time, Variables: map[string]agentapi.Variable{}, Modules: []string{}, Truncated: true}
}

// state is what the kernel said it holds, as far as that is believed; a kernel that is gone holds nothing. Of one that ran and did
// not say, nothing is known: what it held before it may not hold now.
func (r *recorder) state() (PythonState, bool) {
	s := PythonState{Time: now(), Variables: map[string]agentapi.Variable{}, Modules: []string{}}
	switch {
	case r.end.Lost:
		return s, true
	case r.end.Outcome == "":
		return s, false
	}
	var held agentapi.Holding
	if len(r.end.Value) == 0 || json.Unmarshal(r.end.Value, &held) != nil || held.Variables == nil {
		s.Truncated = true
		return s, true
	}
	s.take(held)
	return s, true
}

// take takes over what is said within bounds: whoever says it is in the hands of the session's code.
func (s *PythonState) take(held agentapi.Holding) {
	s.Truncated = held.Truncated || len(held.Variables) > maxVariable || len(held.Modules) > maxModules
	short := func(text string, n int) string {
		text, cut := clip(text, n)
		s.Truncated = s.Truncated || cut
		return strings.Clone(text)
	}
	for _, name := range slices.Sorted(maps.Keys(held.Variables))[:min(len(held.Variables), maxVariable)] {
		v := held.Variables[name]
		s.Variables[short(name, maxName)] = agentapi.Variable{Type: short(v.Type, maxType), Value: short(v.Value, maxValue)}
	}
	for _, name := range held.Modules[:min(len(held.Modules), maxModules)] {
		s.Modules = append(s.Modules, short(name, maxName))
	}
}

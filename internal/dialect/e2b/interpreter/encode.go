package interpreter

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// timeFormat is what a date of Jupyter's messages looks like.
const timeFormat = "2006-01-02T15:04:05.000000Z07:00"

// keys are the MIME types that have a key of their own; others are in extra.
var keys = map[string]string{
	"text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
	"image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
	"application/javascript": "javascript", agentapi.MIMEData: "data", agentapi.MIMEChart: "chart",
}

type wireOutput struct {
	Type      string `json:"type"`
	Text      string `json:"text"`
	Timestamp string `json:"timestamp"`
}

type wireError struct {
	Type      string `json:"type"`
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

type wireCount struct {
	Type  string `json:"type"`
	Count int    `json:"execution_count"`
}

type wireNotice struct {
	Type string `json:"type"` // unknown to SDKs, which pass it by
	Text string `json:"text"`
}

var lastLine = []byte(`{"type":"end_of_execution"}` + "\n")

// maxHeld is how long the beginning of a line may get before it is passed on as it is.
const maxHeld = 4 << 10

// encoder turns the events of one run into lines. Output is bytes: a character may come in two pieces, and so may a line, since
// many programs write one in several steps. Clients look for lines, so the beginning of one waits for the rest, for a moment.
type encoder struct {
	// apart tells the end of the last line by itself, as the kernel of Java in E2B's image does: the first output of a println is
	// its text alone.
	apart bool
	rest  [2]beginning // of stdout and stderr
}

// beginning is what a line has so far.
type beginning struct {
	data  []byte
	at    time.Time // of its event
	since time.Time // it waits
}

// unsaid are events that give no lines.
func unsaid(e *agentapi.Event) bool {
	switch e.Type {
	case agentapi.EventStarted:
		return e.Count <= 0
	case agentapi.EventResult:
		return e.Result.Update // SDKs have no results that change
	case agentapi.EventFile, agentapi.EventReady, agentapi.EventBranch:
		return true
	case agentapi.EventStdout, agentapi.EventStderr, agentapi.EventError, agentapi.EventNotice, agentapi.EventEnd:
	}
	return false
}

// lines gives the lines of an event: none when its output waits, one, or the last ones. A run that never began is an error.
func (enc *encoder) lines(e *agentapi.Event) ([]byte, error) {
	if unsaid(e) {
		return nil, nil
	}
	switch e.Type {
	case agentapi.EventStarted:
		return appendLine(nil, wireCount{"number_of_executions", e.Count}), nil
	case agentapi.EventStdout:
		return enc.output(0, e), nil
	case agentapi.EventStderr:
		return enc.output(1, e), nil
	case agentapi.EventResult:
		return append(enc.held(false), resultLine(e.Result)...), nil
	case agentapi.EventError:
		return appendLine(enc.held(true), wireError{"error", e.Error.Name, e.Error.Value, traceback(e.Error.Traceback)}), nil
	case agentapi.EventNotice:
		return appendLine(enc.held(false), wireNotice{"notice", e.Message}), nil
	case agentapi.EventEnd:
		return enc.end(e.End)
	case agentapi.EventFile, agentapi.EventReady, agentapi.EventBranch:
	}
	return nil, nil
}

func (enc *encoder) end(end *agentapi.End) ([]byte, error) {
	lines := enc.held(true)
	switch end.Outcome {
	case agentapi.OutcomeRefused:
		if end.Fault != nil {
			return nil, fault.New(end.Fault.Kind, "%s", end.Fault.Message)
		}
		return nil, fault.New(fault.Internal, "the run was refused")
	case agentapi.OutcomeOK, agentapi.OutcomeError, agentapi.OutcomeInterrupted: // what there is to say was said by an error
	case agentapi.OutcomeTimeout:
		lines = appendLine(lines, wireError{Type: "error", Name: "ExecutionAborted", Value: end.Message})
	case agentapi.OutcomeKernelDied, agentapi.OutcomeOOM, agentapi.OutcomeKilled:
		lines = appendLine(lines, wireError{Type: "error", Name: "ContextRestarting", Value: end.Message})
	}
	return append(lines, lastLine...), nil
}

var streams = [2]string{"stdout", "stderr"}

func (enc *encoder) output(i int, e *agentapi.Event) []byte {
	lines := enc.pass(nil, 1-i, false) // what came first is told first
	rest := &enc.rest[i]
	if len(rest.data) == unfinished(rest.data) { // nothing that could have been told
		rest.since = time.Now()
	}
	rest.data, rest.at = append(rest.data, e.Data...), e.Time
	n := bytes.LastIndexByte(rest.data, '\n') + 1
	if len(rest.data)-n > maxHeld {
		return enc.pass(lines, i, false)
	}
	if n == 0 {
		return lines
	}
	lines = enc.outputLines(lines, i, rest.data[:n])
	*rest = beginning{bytes.Clone(rest.data[n:]), e.Time, time.Now()}
	return lines
}

// holds tells whether a line waits for its rest, and since when the older one does.
func (enc *encoder) holds() (held bool, since time.Time) {
	for _, rest := range enc.rest {
		if len(rest.data) > unfinished(rest.data) && (!held || rest.since.Before(since)) {
			held, since = true, rest.since
		}
	}
	return held, since
}

// held gives what waits; all of it when nothing can follow, otherwise whole characters.
func (enc *encoder) held(all bool) []byte {
	return enc.pass(enc.pass(nil, 0, all), 1, all)
}

func (enc *encoder) pass(to []byte, i int, all bool) []byte {
	rest := &enc.rest[i]
	n := len(rest.data)
	if !all {
		n -= unfinished(rest.data)
	}
	if n > 0 {
		to = enc.outputLines(to, i, rest.data[:n])
		rest.data = bytes.Clone(rest.data[n:])
	}
	return to
}

func (enc *encoder) outputLines(to []byte, i int, data []byte) []byte {
	at := enc.rest[i].at
	if line, whole := bytes.CutSuffix(data, []byte("\n")); enc.apart && whole && len(line) > 0 {
		return outputLine(outputLine(to, i, line, at), i, []byte("\n"), at)
	}
	return outputLine(to, i, data, at)
}

func outputLine(to []byte, i int, data []byte, at time.Time) []byte {
	if at.IsZero() {
		at = time.Now()
	}
	// Marshal replaces bytes that are no text by U+FFFD.
	return appendLine(to, wireOutput{streams[i], string(data), at.UTC().Format(timeFormat)})
}

// unfinished is how many bytes at the end begin a character that may still become whole.
func unfinished(data []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(data)); n++ {
		if c := data[len(data)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(data[len(data)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}

func resultLine(r *agentapi.Result) []byte {
	line := map[string]any{"type": "result", "is_main_result": r.Main}
	extra := map[string]json.RawMessage{}
	for mime, value := range r.Data {
		if string(value) == "null" {
			continue
		}
		switch key := keys[mime]; key {
		case "":
			extra[mime] = value
		case "text":
			line[key] = unquoted(value)
		default:
			line[key] = value
		}
	}
	if len(extra) > 0 {
		line["extra"] = extra
	}
	return appendLine(nil, line)
}

// unquoted takes one pair of quotes from around a text, so that the value of 'a' is shown as a.
func unquoted(raw json.RawMessage) json.RawMessage {
	for _, quote := range []string{`'`, `\"`} {
		inner, first := bytes.CutPrefix(raw, []byte(`"`+quote))
		if inner, last := bytes.CutSuffix(inner, []byte(quote+`"`)); first && last {
			return fmt.Appendf(nil, `"%s"`, inner)
		}
	}
	return raw
}

// appendLine adds a value as a line of ASCII: SDKs decode each piece of the stream by itself, and a character of several
// bytes could be cut.
func appendLine(to []byte, value any) []byte {
	raw, err := json.Marshal(value)
	if err != nil { // a kernel's JSON was read once already
		raw = []byte(`{"type":"notice","text":"a result that cannot be shown"}`)
	}
	return append(ascii(to, raw), '\n')
}

// ascii adds JSON, in which characters beyond ASCII are written by their numbers.
func ascii(to, raw []byte) []byte {
	for len(raw) > 0 {
		n := 0
		for n < len(raw) && raw[n] < utf8.RuneSelf {
			n++
		}
		to = append(to, raw[:n]...)
		if raw = raw[n:]; len(raw) == 0 {
			break
		}
		r, size := utf8.DecodeRune(raw)
		if raw = raw[size:]; r < 0x10000 {
			to = fmt.Appendf(to, `\u%04x`, r)
			continue
		}
		high, low := utf16.EncodeRune(r)
		to = fmt.Appendf(to, `\u%04x\u%04x`, high, low)
	}
	return to
}

package telemetry

import (
	"context"
	"fmt"
	"iter"
	"path"
	"strings"
	"sync"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// spanRun is the name of the one span that each run has, whatever came to run it.
const spanRun = "sandbox.exec"

// The attributes of a run. The first three are there before anything runs; dashboards of others know these names.
const (
	keyCodeLength = attribute.Key("sandbox.code_length")  // characters
	keyTimeout    = attribute.Key("sandbox.timeout_s")    // zero: none
	keyMemLimit   = attribute.Key("sandbox.mem_limit_mb") // the run's own, or the sandbox's

	keyExitCode = attribute.Key("sandbox.exit_code") // as agentapi.End.Status has it
	keyTimedOut = attribute.Key("sandbox.timed_out")
	keyStdout   = attribute.Key("sandbox.stdout_bytes")
	keyStderr   = attribute.Key("sandbox.stderr_preview") // empty unless it is asked for

	keyID       = attribute.Key("sandbox.id")
	keySession  = attribute.Key("sandbox.session")
	keyFrom     = attribute.Key("sandbox.template")
	keyDriver   = attribute.Key("sandbox.driver")
	keyKind     = attribute.Key("sandbox.kind")
	keyLanguage = attribute.Key("sandbox.language") // of snippets and cells whose kernel is known to speak it
	keyOutcome  = attribute.Key("sandbox.outcome")
	keyCPU      = attribute.Key("sandbox.cpu_time_s")
	keyPeak     = attribute.Key("sandbox.max_rss_bytes")
)

// sessionAnnotation names the session that a sandbox is of.
const sessionAnnotation = "cove.session"

// What is shown of stderr at most, in characters.
const (
	maxPreview     = 200
	maxDescription = 120
)

// asking is what is known of a run before it begins.
type asking struct {
	kind        sandbox.RunKind
	language    string
	codeLength  int
	timeoutMS   int64
	memoryBytes int64 // zero: no limit of its own
}

// Run is sandbox.exec of a cell; it lasts until the caller has read its end.
func (m *Manager) Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	return func(yield func(agentapi.Event, error) bool) {
		what := asking{kind: sandbox.RunCell, codeLength: utf8.RuneCountInString(params.Code), timeoutMS: params.TimeoutMS}
		if params.Kernel == "" || params.Kernel == agentapi.DefaultKernel {
			what.language = agentapi.LanguagePython
		}
		ctx, run := m.startRun(ctx, p, id, what)
		defer run.close()
		params.Env = withParent(ctx, params.Env)
		for event, err := range m.Manager.Run(ctx, p, id, params) {
			if err != nil {
				run.fail(err)
			} else {
				run.hear(&event)
			}
			if !yield(event, err) {
				return
			}
		}
	}
}

// Exec is sandbox.exec of a command or a snippet; it lasts until the stream is closed.
func (m *Manager) Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	what := asking{kind: sandbox.ExecKind(params), codeLength: commandLength(params.Argv), timeoutMS: params.TimeoutMS, memoryBytes: params.Limits.MemoryBytes}
	if params.Snippet != nil {
		what.codeLength, what.language = params.Snippet.CodeLength, agentapi.LanguagePython
	}
	ctx, run := m.startRun(ctx, p, id, what)
	if !params.CleanEnv {
		params.Env = withParent(ctx, params.Env)
	}
	stream, err := m.Manager.Exec(ctx, p, id, params)
	if err != nil {
		run.fail(err)
		run.close()
		return nil, err
	}
	stream.OnEvent(run.hear)
	stream.OnClose(run.close)
	return stream, nil
}

// commandLength is how long a command is as its author wrote it: a line for a shell, or words.
func commandLength(argv []string) int {
	if len(argv) == 3 && strings.HasSuffix(path.Base(argv[0]), "sh") && strings.HasPrefix(argv[1], "-") && strings.HasSuffix(argv[1], "c") {
		return utf8.RuneCountInString(argv[2])
	}
	return utf8.RuneCountInString(strings.Join(argv, " "))
}

// startRun begins the span of a run with all that is known of it.
func (m *Manager) startRun(ctx context.Context, p auth.Principal, id string, what asking) (context.Context, *runSpan) {
	ctx, span := m.start(ctx, spanRun, p, id)
	run := &runSpan{span: span, cell: what.kind == sandbox.RunCell, capture: m.capture}
	if !span.IsRecording() {
		return ctx, run
	}
	sb, err := m.Get(ctx, p, id) // from memory; what is not there has no attributes, and the run itself says so
	if err == nil && what.memoryBytes == 0 {
		what.memoryBytes = sb.Limits.MemoryBytes
	}
	span.SetAttributes(keyCodeLength.Int(what.codeLength), keyTimeout.Float64(float64(what.timeoutMS)/1000), keyMemLimit.Int64(what.memoryBytes>>20),
		keyKind.String(string(what.kind)), keyDriver.String(m.driver))
	if what.language != "" {
		span.SetAttributes(keyLanguage.String(what.language))
	}
	if err == nil {
		span.SetAttributes(keyID.String(sb.ID), keyFrom.String(sb.Template))
		if session := sb.Annotations[sessionAnnotation]; session != "" {
			span.SetAttributes(keySession.String(session))
		}
	}
	return ctx, run
}

// runSpan is the span of one run. What failed is told by its kind only: a sentence about a command may quote it.
type runSpan struct {
	span    trace.Span
	cell    bool
	capture bool
	once    sync.Once

	mu     sync.Mutex // a stream may be closed while it is read
	stdout int64
	stderr []byte // its beginning, when it is captured
	known  bool   // how it ended
}

// hear takes in what the run tells.
func (s *runSpan) hear(e *agentapi.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e.Type {
	case agentapi.EventStdout:
		s.stdout += int64(len(e.Data))
	case agentapi.EventStderr:
		s.keep(e.Data)
	case agentapi.EventError: // of a cell; a command would have written it to stderr
		s.keep([]byte(e.Error.Name + ": " + e.Error.Value))
	case agentapi.EventEnd:
		s.known = true
		s.end(e.End)
	}
}

func (s *runSpan) keep(data []byte) {
	if room := maxPreview*utf8.UTFMax - len(s.stderr); s.capture && room > 0 {
		s.stderr = append(s.stderr, data[:min(len(data), room)]...)
	}
}

// shown is the beginning of stderr, as text.
func (s *runSpan) shown(limit int) string {
	text := []rune(strings.ToValidUTF8(string(s.stderr), "\uFFFD"))
	return string(text[:min(len(text), limit)])
}

func (s *runSpan) end(end *agentapi.End) {
	s.span.SetAttributes(keyOutcome.String(string(end.Outcome)), keyExitCode.Int(end.Status()), keyTimedOut.Bool(end.Outcome == agentapi.OutcomeTimeout),
		keyCPU.Float64(end.Usage.CPUMS/1000), keyPeak.Int64(end.Usage.PeakBytes))
	if end.Outcome == agentapi.OutcomeOK {
		s.span.SetStatus(codes.Ok, "")
		return
	}
	description := s.shown(maxDescription)
	if description == "" {
		description = s.describe(end)
	}
	s.span.SetStatus(codes.Error, description)
	s.span.SetAttributes(keyFault.String(string(end.Outcome)))
}

// describe says how a run ended in words that are not its own.
func (s *runSpan) describe(end *agentapi.End) string {
	switch {
	case end.Outcome == agentapi.OutcomeTimeout:
		return "timed out"
	case end.Outcome == agentapi.OutcomeError && s.cell:
		return "raised an exception"
	case end.Outcome == agentapi.OutcomeError:
		return fmt.Sprintf("exited with status %d", end.ExitCode)
	case end.Outcome == agentapi.OutcomeKilled && end.Signal != "":
		return "ended by " + end.Signal
	}
	return string(end.Outcome)
}

func (s *runSpan) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = true
	kind := fault.KindOf(err)
	s.span.SetStatus(codes.Error, string(kind))
	s.span.SetAttributes(keyFault.String(string(kind)), keyTimedOut.Bool(kind == fault.Timeout))
}

func (s *runSpan) close() {
	s.once.Do(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.span.SetAttributes(keyStdout.Int64(s.stdout), keyStderr.String(s.shown(maxPreview)))
		if !s.known {
			s.span.SetAttributes(keyOutcome.String(outcomeLeft), keyTimedOut.Bool(false))
		}
		s.span.End()
	})
}

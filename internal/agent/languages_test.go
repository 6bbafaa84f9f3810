package agent_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// withLanguage is a home with a kernel "k" of a language, which needs a program of this host's.
func withLanguage(t *testing.T, language, program string) *home {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("this host has no %s", program)
	}
	h := newHome(t, agentapi.Boot{ID: "a", Kernel: absolute(t, "../../kernel/kernel.py"), Env: map[string]string{"PATH": os.Getenv("PATH"), "HAVE": "1"}})
	h.startLanguage(t, language)
	return h
}

func (h *home) startLanguage(t *testing.T, language string) {
	t.Helper()
	if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "k", Language: language, Cwd: "/usr"}); err != nil {
		t.Fatal(err)
	}
	k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: "k"})
	if err != nil || k.State != agentapi.KernelIdle || k.Language != language {
		t.Fatalf("%+v, %v", k, err)
	}
}

// tale is what a cell tells.
type tale struct {
	count          int
	stdout, stderr string
	results        []string // MIME type and value; the main one after a star
	failed         *agentapi.CodeError
	end            agentapi.End
}

func (h *home) hear(t *testing.T, p agentapi.RunParams, on func(agentapi.Event)) (told tale) {
	t.Helper()
	p.Kernel = "k"
	s, err := h.Run(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case agentapi.EventStarted:
			told.count = e.Count
		case agentapi.EventStdout:
			told.stdout += string(e.Data)
		case agentapi.EventStderr:
			told.stderr += string(e.Data)
		case agentapi.EventResult:
			told.results = append(told.results, line(t, e.Result))
		case agentapi.EventError:
			told.failed = e.Error
		case agentapi.EventEnd:
			told.end = *e.End
		}
		if on != nil {
			on(e)
		}
	}
	return told
}

func line(t *testing.T, r *agentapi.Result) (out string) {
	t.Helper()
	if r.Main {
		out = "*"
	}
	for mime, raw := range r.Data {
		var text string
		if err := json.Unmarshal(raw, &text); err != nil {
			t.Fatal(err)
		}
		out += mime + " " + text
	}
	return out
}

func (h *home) tells(t *testing.T, code string) tale {
	t.Helper()
	return h.hear(t, agentapi.RunParams{Code: code}, nil)
}

func TestJava(t *testing.T) {
	h := withLanguage(t, agentapi.LanguageJava, "jshell")
	if got := h.tells(t, "int x = 40; System.out.println(\"out\"); System.err.println(\"err\"); x + 2"); got.stdout != "out\n" || got.stderr != "err\n" ||
		!slices.Equal(got.results, []string{"*text/plain 42"}) || got.count != 1 || got.end.Outcome != agentapi.OutcomeOK || got.end.Usage.PeakBytes == 0 {
		t.Errorf("%+v", got)
	}
	got := h.hear(t, agentapi.RunParams{Code: `System.getenv("HAVE") + System.getenv("MORE") + x`, Env: map[string]string{"HAVE": "2", "MORE": "é"}}, nil)
	if !slices.Equal(got.results, []string{`*text/plain "2é40"`}) || got.count != 2 {
		t.Errorf("%+v", got)
	}
	if got := h.tells(t, `System.getenv("HAVE") + System.getenv("MORE") + Path.of("").toAbsolutePath()`); !slices.Equal(got.results, []string{`*text/plain "1null/usr"`}) {
		t.Errorf("%+v", got)
	}
	if got := h.tells(t, "throw new IllegalStateException(\"bad\");"); got.failed == nil || got.failed.Name != "EvalException" ||
		got.failed.Value != "java.lang.IllegalStateException: bad" || len(got.failed.Traceback) < 2 || got.end.Outcome != agentapi.OutcomeError {
		t.Errorf("%+v %+v", got, got.failed)
	}
	if got := h.tells(t, `"%".repeat(9 << 20)`); len(got.results) != 1 || !strings.HasPrefix(got.results[0], "*text/plain <result left out: ") {
		t.Errorf("%.200q", got.results)
	}
	h.isInterrupted(t, "System.out.println(\"go\"); while (true) {}", "x", "*text/plain 40")
	if got := h.tells(t, "System.exit(3);"); got.end.Outcome != agentapi.OutcomeKernelDied || !got.end.Lost || !strings.Contains(got.end.Message, "status 3") {
		t.Errorf("%+v", got)
	}
}

// isInterrupted interrupts a cell that says "go" and never ends, in the two ways there are; then another cell gives a value.
func (h *home) isInterrupted(t *testing.T, code, then, want string) {
	t.Helper()
	got := h.hear(t, agentapi.RunParams{Code: code}, func(e agentapi.Event) {
		if e.Type == agentapi.EventStdout {
			if err := h.Interrupt(t.Context(), agentapi.KernelParams{Kernel: "k"}); err != nil {
				t.Error(err)
			}
		}
	})
	if got.end.Outcome != agentapi.OutcomeInterrupted || got.failed == nil || got.failed.Name != "KeyboardInterrupt" {
		t.Errorf("%+v %+v", got, got.failed)
	}
	ctx, leave := context.WithCancel(t.Context())
	s, err := h.Run(ctx, agentapi.RunParams{Kernel: "k", Code: code})
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == agentapi.EventStdout {
			break
		}
	}
	s.Close()
	leave()
	if got := h.tells(t, then); !slices.Contains(got.results, want) {
		t.Errorf("%+v", got)
	}
	got = h.hear(t, agentapi.RunParams{Code: code, TimeoutMS: 3000}, nil)
	if got.end.Outcome != agentapi.OutcomeTimeout || got.end.Lost {
		t.Errorf("%+v", got)
	}
}

func TestR(t *testing.T) {
	h := withLanguage(t, agentapi.LanguageR, "Rscript")
	for _, c := range []struct {
		name, code     string
		env            map[string]string
		cwd            string
		stdout, stderr string
		results        []string
		failed         string // name and text
	}{
		{name: "every visible value is shown, the last is the main one", code: "x <- 40\nx\ny <- 'é'; x + 2", results: []string{"text/plain [1] 40", "*text/plain [1] 42"}},
		{name: "state is kept", code: "f <- function(n) n * 2\nf(x)", results: []string{"*text/plain [1] 80"}},
		{name: "what is not visible is not shown", code: "invisible(x); z <- 1; for (i in 1:2) i; if (FALSE) 1"},
		{name: "nothing", code: ""},
		{name: "a remark", code: "# nothing"},
		{name: "output", code: "cat('out', y, '\\n'); message('err'); print(1 + 1); cat('no end')", stdout: "out é \n[1] 2\nno end", stderr: "err\n"},
		{name: "a printed table", code: "data.frame(a = 1:2, b = c('x', 'y'))", results: []string{"*text/plain   a b\n1 1 x\n2 2 y"}},
		{name: "methods of the cell's", code: "print.own <- function(v, ...) cat('mine\\n')\nstructure(1, class = 'own')", results: []string{"*text/plain mine"}},
		{name: "a class that shows itself", code: "P <- setClass('P', representation(a = 'numeric')); setMethod('show', 'P', function(object) cat('P of', object@a, '\\n')); P(a = 3)",
			results: []string{"*text/plain P of 3 "}},
		{name: "names of ours", code: "c <- function(...) stop('theirs'); tell <- paste0 <- run <- 1; file <- function(...) NULL; x", results: []string{"*text/plain [1] 40"}},
		{name: "and theirs are theirs", code: "rm(c, file, paste0, tell, run); ls()", results: []string{`*text/plain [1] "f"         "i"         "P"         "print.own" "x"         "y"        ` + "\n[7] \"z\"        "}},
		{name: "a warning", code: "as.integer('a'); warning('careful')", stderr: "Warning message:\nNAs introduced by coercion\nWarning message:\ncareful\n", results: []string{"text/plain [1] NA"}},
		{name: "a warning of a function's", code: "g <- function() { warning('deep'); 7 }; g()", stderr: "Warning message:\nIn g() : deep\n", results: []string{"*text/plain [1] 7"}},
		{name: "warnings that nobody wants", code: "options(warn = -1); g(); options(warn = 0)", results: []string{"text/plain [1] 7"}},
		{name: "warnings that are errors", code: "options(warn = 2); g()", failed: "simpleError (converted from warning) deep"},
		{name: "after that", code: "options(warn = 0); suppressWarnings(g())", results: []string{"*text/plain [1] 7"}},
		{name: "an error", code: "stop('bad')\nx <- 1", failed: "simpleError bad"},
		{name: "an error whose words are no text", code: `stop(simpleError(strrep(rawToChar(as.raw(c(0xff, 0x41))), 600000)))`, failed: "simpleError " + strings.Repeat("?A", 5000)},
		{name: "what is not there", code: "nothing_of_that_name", failed: "simpleError object 'nothing_of_that_name' not found"},
		{name: "a condition of the cell's own", code: "stop(structure(class = c('mine', 'error', 'condition'), list(message = 'own', call = NULL)))", failed: "mine own"},
		{name: "an error that is caught", code: "tryCatch(stop('no'), error = function(e) 'caught')", results: []string{`*text/plain [1] "caught"`}},
		{name: "an error in printing", code: "print.worse <- function(v, ...) stop('unprintable'); structure(1, class = 'worse')", failed: "simpleError unprintable"},
		{name: "after which output is output", code: "cat('on\\n')", stdout: "on\n"},
		{name: "a way out to the top", code: "invokeRestart('abort')", failed: "abort the cell went to the top level"},
		{name: "no end of calls", code: "endless <- function() endless(); endless()", failed: "*"},
		{name: "variables of a cell", code: "cat(Sys.getenv('HAVE'), Sys.getenv('MORE')); invisible(system('echo $MORE'))", env: map[string]string{"HAVE": "2", "MORE": "it's é"}, stdout: "2 it's éit's é\n"},
		{name: "are gone after it", code: "cat(Sys.getenv('HAVE'), is.na(Sys.getenv('MORE', NA)))", stdout: "1 TRUE"},
		{name: "its directory", code: "getwd()", results: []string{`*text/plain [1] "/usr"`}},
		{name: "the directory of a cell", code: "getwd()", cwd: "/usr/bin", results: []string{`*text/plain [1] "/usr/bin"`}},
		{name: "one that is not there", code: "getwd()", cwd: "/no/such", stderr: "/no/such: cannot change working directory\n", results: []string{`*text/plain [1] "/usr"`}},
		{name: "there is no input", code: "readLines(file('stdin'))", results: []string{"*text/plain character(0)"}},
		{name: "connections that a cell closes", code: "closeAllConnections(); x", results: []string{"*text/plain [1] 40"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := h.hear(t, agentapi.RunParams{Code: c.code, Env: c.env, Cwd: c.cwd}, nil)
			failed := ""
			if got.failed != nil {
				failed = got.failed.Name + " " + got.failed.Value
			}
			if got.stdout != c.stdout || got.stderr != c.stderr || !slices.Equal(got.results, c.results) || failed != c.failed && (c.failed != "*" || failed == "") ||
				(got.end.Outcome == agentapi.OutcomeOK) != (c.failed == "") || got.end.Usage.PeakBytes == 0 {
				t.Errorf("%+v %q", got, failed)
			}
		})
	}
	t.Run("cells are counted", func(t *testing.T) {
		first := h.tells(t, "1").count
		if got := h.hear(t, agentapi.RunParams{Code: "2", Silent: true}, nil); len(got.results) != 0 {
			t.Errorf("%+v", got)
		}
		if got := h.tells(t, "3"); got.count != first+1 {
			t.Errorf("%+v after %d", got, first)
		}
	})
	t.Run("a traceback has the cell's own calls", func(t *testing.T) {
		got := h.tells(t, "outer <- function(a) inner(a)\ninner <- function(b) stop('deep in')\nouter(1)")
		if want := []string{"Error in inner(a) : deep in", "1: outer(1)", "2: inner(a)", `3: stop("deep in")`}; got.failed == nil || !slices.Equal(got.failed.Traceback, want) {
			t.Errorf("%+v", got.failed)
		}
	})
	t.Run("code that cannot be read", func(t *testing.T) {
		if got := h.tells(t, "x <- 1\ny y"); got.failed == nil || !strings.Contains(got.failed.Value, "unexpected symbol") || got.end.Outcome != agentapi.OutcomeError {
			t.Errorf("%+v", got)
		}
		if got := h.tells(t, "a\x00b"); got.failed == nil || !strings.Contains(got.failed.Value, "NUL") {
			t.Errorf("%+v", got)
		}
	})
	t.Run("plots are shown", func(t *testing.T) {
		if got := h.tells(t, "cat(capabilities('png') && capabilities('cairo'))"); got.stdout != "TRUE" {
			t.Skip("this R draws no PNG")
		}
		pictures := func(code string) (n int) {
			for _, r := range h.tells(t, code).results {
				if strings.HasPrefix(r, "image/png iVBORw0KGgo") {
					n++
				}
			}
			return n
		}
		for code, want := range map[string]int{
			"plot(1:3)\nlines(3:1)": 1, "plot(1); hist(c(1, 2, 2))": 2, "plot(1); stop('after')": 1, "pdf(NULL); plot(1); invisible(dev.off())": 0,
			"par(mfrow = c(1, 2)); plot(1); plot(2)": 1, "plot(1); invisible(dev.off())": 1, "x": 0,
		} {
			if got := pictures(code); got != want {
				t.Errorf("%q: %d pictures", code, got)
			}
		}
	})
	t.Run("large values are left out", func(t *testing.T) {
		for _, code := range []string{"strrep('%', 9 * 2^20)", "strrep('\\u0001', 3 * 2^20)"} {
			if got := h.tells(t, code); len(got.results) != 1 || !strings.HasPrefix(got.results[0], "*text/plain <result left out: ") {
				t.Errorf("%s: %.200q", code, got.results)
			}
		}
		if got := h.tells(t, "stop(structure(class = c('long', 'error', 'condition'), list(message = strrep('%', 9 * 2^20), call = NULL)))"); got.failed == nil || len(got.failed.Value) != 10000 {
			t.Errorf("%.200q", got.failed)
		}
		if got := h.tells(t, "nchar(strrep('%', 2^20)); strrep('%', 2^20)"); len(got.results) != 2 || len(got.results[1]) < 1<<20 {
			t.Errorf("%.200q", got.results)
		}
	})
	t.Run("an interrupt", func(t *testing.T) {
		h.isInterrupted(t, "cat('go\\n'); repeat {}", "x", "*text/plain [1] 40")
		h.isInterrupted(t, "cat('go\\n'); Sys.sleep(100)", "x", "*text/plain [1] 40")
	})
	t.Run("one for a cell that has just begun", func(t *testing.T) {
		got := h.hear(t, agentapi.RunParams{Code: "repeat {}"}, func(e agentapi.Event) {
			if e.Type == agentapi.EventStarted {
				if err := h.Interrupt(t.Context(), agentapi.KernelParams{Kernel: "k"}); err != nil {
					t.Error(err)
				}
			}
		})
		if got.end.Outcome != agentapi.OutcomeInterrupted {
			t.Errorf("%+v", got)
		}
	})
	t.Run("it is another user's", func(t *testing.T) {
		if os.Getuid() != 0 {
			t.Skip("needs root to be another user")
		}
		if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "other", Language: agentapi.LanguageR, User: "nobody", Cwd: "/"}); err != nil {
			t.Fatal(err)
		}
		if k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: "other"}); err != nil || k.State != agentapi.KernelIdle {
			t.Errorf("%+v, %v", k, err)
		}
	})
	t.Run("quit ends it and is told", func(t *testing.T) {
		if got := h.tells(t, "cat('last\\n'); quit(status = 3)"); got.stdout != "last\n" || got.end.Outcome != agentapi.OutcomeKernelDied || !strings.Contains(got.end.Message, "status 3") {
			t.Errorf("%+v", got)
		}
		h.startLanguage(t, agentapi.LanguageR)
		if got := h.tells(t, "exists('x')"); !slices.Equal(got.results, []string{"*text/plain [1] FALSE"}) {
			t.Errorf("%+v", got)
		}
	})
}

// TestAProgramThatIsNotEnough: what a sandbox calls java may be no JDK, and what it calls Rscript no R.
func TestAProgramThatIsNotEnough(t *testing.T) {
	bin := t.TempDir()
	program := func(name, script string) {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h := newHome(t, agentapi.Boot{ID: "a", Kernel: absolute(t, "../../kernel/kernel.py"), Env: map[string]string{"PATH": bin}})
	program("java", "echo 'Module jdk.jshell not found' >&2; exit 1")
	_, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "j", Language: agentapi.LanguageJava})
	if !fault.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), "jdk.jshell, which kernels of java need") {
		t.Errorf("%v", err)
	}
	program("Rscript", "echo 'R is broken here' >&2; exit 2")
	if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "r", Language: agentapi.LanguageR}); err != nil {
		t.Fatal(err)
	}
	k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: "r"})
	if err != nil || k.State != agentapi.KernelDead || !strings.Contains(k.Message, "status 2") || !strings.HasSuffix(k.Message, "it said: R is broken here") {
		t.Errorf("%+v, %v", k, err)
	}
}

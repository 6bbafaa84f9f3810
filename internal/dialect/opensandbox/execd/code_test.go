package execd_test

import (
	"bufio"
	"context"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

func needs(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skip(err)
	}
}

func TestCode(t *testing.T) {
	needs(t, "python3")
	w := newWorld(t)
	python := map[string]any{"language": "python"}
	for i, step := range []struct {
		code string
		in   any
		want []string
	}{
		{"x = 1; print('hi')\n2 + 2", python, []string{"init", "stdout hi\n", "result \"4\"", "execution_complete"}},
		{"x + 1", python, []string{"init", "result \"2\"", "execution_complete"}},
		{"nope", python, []string{"init", "error NameError name 'nope' is not defined"}},
		{"echo $((1+1))", map[string]any{"language": "bash"}, []string{"init", "stdout 2\n", "execution_complete"}},
		{"echo as a command; exit 3", nil, []string{"init", "stdout as a command", "error CommandExecError 3"}},
	} {
		got := told(w.stream("/code", map[string]any{"code": step.code, "context": step.in}))
		if !slices.Equal(got, step.want) {
			t.Fatalf("step %d, %q: got %q, want %q", i, step.code, got, step.want)
		}
	}
	got := told(w.stream("/code", map[string]any{"code": "1", "context": map[string]any{"language": "cobol"}}))
	if len(got) != 2 || !strings.HasPrefix(got[1], "error NOT_SUPPORTED code in cobol cannot be run here") {
		t.Fatalf("got %q", got)
	}
}

func TestCodeWithoutAKernel(t *testing.T) {
	needs(t, "go")
	w := newWorld(t)
	in := map[string]any{"language": "go"}
	code := "import \"fmt\"\nfunc main() { fmt.Println(2 + 2) }\n"
	if got := told(w.stream("/code", map[string]any{"code": code, "context": in})); !slices.Equal(got, []string{"init", "stdout 4\n", "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	got := told(w.stream("/code", map[string]any{"code": "package main\nfunc main() { nonsense }", "context": in}))
	if len(got) != 3 || !strings.Contains(got[1], "nonsense") || !strings.HasPrefix(got[2], "error ExecutionError exited with status 1") {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("DELETE", "/code/contexts?language=go", nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
}

func TestCodeInALanguageThatIsMissing(t *testing.T) {
	w := newWorldWith(t, map[string]string{"PATH": t.TempDir()})
	for language, says := range map[string]string{"java": "no java", "r": "no Rscript", "javascript": "no node"} {
		got := told(w.stream("/code", map[string]any{"code": "1", "context": map[string]any{"language": language}}))
		if want := "error NOT_SUPPORTED this sandbox's image or template has " + says + ", which kernels of " + language + " need"; len(got) != 2 || got[1] != want {
			t.Errorf("%s: got %q", language, got)
		}
	}
}

func TestCodeInJava(t *testing.T) {
	needs(t, "jshell")
	w := newWorld(t)
	var in codeContext
	w.json(w.ask("POST", "/code/context", map[string]any{"language": "java"}), &in)
	run := func(code string) []string {
		return told(w.stream("/code", map[string]any{"code": code, "context": in}))
	}
	for i, step := range []struct {
		code string
		want []string
	}{
		{"System.out.print(\"Hello\");\nint result = 2 + 2;\nresult", []string{"init", "stdout Hello", "result \"4\"", "execution_complete"}},
		{"int f(int a) {\n  return a * 2;\n}\nf(result)", []string{"init", "result \"8\"", "execution_complete"}},
		{"throw new IllegalStateException(\"bad\");", []string{"init", "error EvalException java.lang.IllegalStateException: bad"}},
		{"throw new RuntimeException();", []string{"init", "error EvalException java.lang.RuntimeException"}},
		{"int wrong = nothing;", []string{"init", "error CompilationException cannot find symbol\n  symbol:   variable nothing\n  location: class"}},
		{"System.exit(3);", []string{"init", "error KernelDied the kernel exited with status 3 (exit() was called?); variables are lost, the next run starts a fresh kernel"}},
		{"1 + 1", []string{"init", "stderr kernel \"" + in.ID + "\" was gone and has been started anew; its variables are lost\n", "result \"2\"", "execution_complete"}},
	} {
		if got := run(step.code); !slices.Equal(got, step.want) {
			t.Fatalf("step %d, %q: got %q, want %q", i, step.code, got, step.want)
		}
	}
	for value, whole := range map[string]bool{"2 << 20": true, "9 << 20": false} {
		long := strings.Join(run(`System.out.print("#".repeat(3 << 20)); "%".repeat(`+value+`)`), "")
		if x, y := strings.Count(long, "#"), strings.Count(long, "%"); x != 3<<20 || (y == 2<<20) != whole || !strings.HasSuffix(long, "execution_complete") {
			t.Fatalf("%d of the output, %d of the value, then %q", x, y, long[max(0, len(long)-80):])
		}
	}
	w.interrupts(in, "System.out.print(1); while (true) Thread.sleep(10);", "stdout")
	if got := run("1 + 1"); !slices.Equal(got, []string{"init", "result \"2\"", "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("DELETE", "/code/contexts/"+in.ID, nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
}

func TestJavaIsInterruptedBeforeItsKernelHasStarted(t *testing.T) {
	needs(t, "jshell")
	w := newWorld(t)
	var in codeContext
	w.json(w.ask("POST", "/code/context", map[string]any{"language": "java"}), &in)
	if a := w.ask("DELETE", "/code?id="+in.ID, nil); a.status != 200 { // of nothing, which the next cell must not feel
		t.Fatalf("got %+v", a)
	}
	for range 2 {
		w.interrupts(in, "while (true) {}", "init")
		got := told(w.stream("/code", map[string]any{"code": "1 + 1", "context": in}))
		if !slices.Equal(got, []string{"init", "result \"2\"", "execution_complete"}) {
			t.Fatalf("got %q", got)
		}
		told(w.stream("/code", map[string]any{"code": "System.exit(0);", "context": in})) // so that the next cell has to wait for another kernel
		w.interrupts(in, "while (true) {}", "init")
	}
}

func TestCodeInR(t *testing.T) {
	needs(t, "Rscript")
	w := newWorld(t)
	in := map[string]any{"language": "R"}
	for i, step := range []struct {
		code string
		want []string
	}{
		{"x <- 2; cat('hi\\n'); x", []string{"init", "stdout hi\n", "result \"[1] 2\"", "execution_complete"}},
		{"x + 1", []string{"init", "result \"[1] 3\"", "execution_complete"}},
		{"stop('bad')", []string{"init", "error simpleError bad"}},
	} {
		if got := told(w.stream("/code", map[string]any{"code": step.code, "context": in})); !slices.Equal(got, step.want) {
			t.Fatalf("step %d, %q: got %q, want %q", i, step.code, got, step.want)
		}
	}
}

// interrupts runs code that never ends and interrupts it once it has told an event of a kind.
func (w *world) interrupts(in codeContext, code, after string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	resp := w.send(ctx, "POST", "/code", map[string]any{"code": code, "context": in})
	defer resp.Body.Close()
	stream := bufio.NewReader(resp.Body)
	for e, _ := nextEvent(w.t, stream); e.Type != after; e, _ = nextEvent(w.t, stream) {
	}
	if a := w.ask("DELETE", "/code?id="+in.ID, nil); a.status != 200 {
		w.t.Fatalf("got %+v", a)
	}
	var last event
	for e, more := nextEvent(w.t, stream); more; e, more = nextEvent(w.t, stream) {
		last = e
	}
	if last.Error == nil || last.Error.Name != "KeyboardInterrupt" || last.Error.Value == "" {
		w.t.Fatalf("got %+v", last)
	}
}

type codeContext struct{ ID, Language string }

func TestContexts(t *testing.T) {
	needs(t, "python3")
	w := newWorld(t)
	var one, other, found codeContext
	w.json(w.ask("POST", "/code/context", map[string]any{"language": "python", "cwd": "/tmp"}), &one)
	w.json(w.ask("POST", "/code/context", map[string]any{"language": "python"}), &other)
	run := func(c codeContext, code string) []string {
		return told(w.stream("/code", map[string]any{"code": code, "context": c}))
	}
	run(one, "v = 5")
	if got := run(one, "import os; (v, os.getcwd())"); !slices.Equal(got, []string{"init", `result "(5, '/tmp')"`, "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	if got := run(other, "v"); len(got) != 2 || !strings.HasPrefix(got[1], "error NameError") {
		t.Fatalf("contexts share variables: %q", got)
	}
	var list []codeContext
	w.json(w.ask("GET", "/code/contexts?language=python", nil), &list)
	if !slices.Equal(list, []codeContext{one, other}) {
		t.Fatalf("got %+v", list)
	}
	w.json(w.ask("GET", "/code/contexts/"+one.ID, nil), &found)
	if found != one {
		t.Fatalf("got %+v", found)
	}
	if a := w.ask("DELETE", "/code/contexts/"+one.ID, nil); a.status != 200 || a.header.Get("Content-Length") != "0" {
		t.Fatalf("got %+v", a)
	}
	if a := w.ask("GET", "/code/contexts/"+one.ID, nil); a.status != 404 || !strings.Contains(a.body, "CONTEXT_NOT_FOUND") {
		t.Fatalf("got %+v", a)
	}
	if a := w.ask("DELETE", "/code/contexts?language=python", nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	if a := w.ask("GET", "/code/contexts?language=python", nil); a.body != "[]" {
		t.Fatalf("got %+v", a)
	}
}

func TestABusyContextIsInterrupted(t *testing.T) {
	needs(t, "python3")
	w := newWorld(t)
	python := map[string]any{"language": "python"}
	resp := w.send(t.Context(), "POST", "/code", map[string]any{"code": "print('on', flush=True)\nimport time\nwhile True: time.sleep(0.01)", "context": python})
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	first, _ := nextEvent(t, in)
	for e := first; e.Type != "stdout"; e, _ = nextEvent(t, in) {
	}
	got := told(w.stream("/code", map[string]any{"code": "1", "context": python}))
	if len(got) != 2 || !strings.HasPrefix(got[1], "error RUNTIME_ERROR session is busy") {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("DELETE", "/code?id="+first.Text, nil); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	var last event
	for e, more := nextEvent(t, in); more; e, more = nextEvent(t, in) {
		last = e
	}
	if last.Error == nil || last.Error.Name != "KeyboardInterrupt" || last.Error.Value == "" {
		t.Fatalf("got %+v", last)
	}
	if got := told(w.stream("/code", map[string]any{"code": "7", "context": python})); !slices.Equal(got, []string{"init", `result "7"`, "execution_complete"}) {
		t.Fatalf("got %q", got)
	}
	if a := w.ask("DELETE", "/code?id=nobody", nil); a.status != 400 || !strings.Contains(a.body, "CONTEXT_NOT_FOUND") {
		t.Fatalf("got %+v", a)
	}
}

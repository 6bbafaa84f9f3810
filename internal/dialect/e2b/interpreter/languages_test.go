package interpreter_test

import (
	"context"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("this host has no %s", program)
	}
}

func TestBash(t *testing.T) {
	need(t, "bash")
	w := newWorld(t)
	w.run(t, object{"code": "x=1; cd /usr", "language": "bash"})
	e := w.run(t, object{"code": "echo $x $GLOBAL $MINE; pwd; echo oh >&2; false", "language": "bash", "env_vars": object{"MINE": "2"}})
	if e.stdout != "1 here 2\n/usr\n" || e.stderr != "oh\n" || e.err["name"] != "ExitCode" || e.err["value"] != "1" || e.count != 2 {
		t.Errorf("%+v", e)
	}
}

func TestJavaScript(t *testing.T) {
	need(t, "node")
	w := newWorld(t)
	w.run(t, object{"code": "const kept = [1, 'é']", "language": "javascript"})
	if e := w.run(t, object{"code": "console.log(process.cwd()); kept", "language": "JS"}); e.stdout != w.home+"\n" || e.text() != "[ 1, 'é' ]" ||
		!same(e.results[0]["json"], []any{1, "é"}) || e.count != 2 {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": "kept", "context_id": "javascript"}); e.count != 3 {
		t.Errorf("%+v", e)
	}
	ctx, leave := context.WithCancel(t.Context())
	w.begin(t, ctx, object{"code": "console.log('go'); while (true) {}", "language": "js"})
	leave()
	begun := time.Now()
	if e := w.run(t, object{"code": "kept.length", "language": "js"}); e.text() != "2" || time.Since(begun) > time.Minute {
		t.Errorf("%+v after %v", e, time.Since(begun))
	}
	if status, body := w.do(t, http.MethodPost, "/contexts/javascript/restart", nil); status != http.StatusOK {
		t.Error(status, body)
	}
	if e := w.run(t, object{"code": "kept", "language": "js"}); e.err["name"] != "ReferenceError" {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": "process.exit(4)", "language": "js"}); e.err["name"] != "ContextRestarting" || !strings.Contains(e.err["value"].(string), "status 4") {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": "1", "language": "js"}); e.text() != "1" {
		t.Errorf("%+v", e)
	}
}

func TestR(t *testing.T) {
	need(t, "Rscript")
	w := newWorld(t)
	w.run(t, object{"code": "kept <- c(1, 2)", "language": "r"})
	e := w.run(t, object{"code": "cat(getwd(), Sys.getenv('GLOBAL'), Sys.getenv('MINE')); kept", "language": "R", "env_vars": object{"MINE": "2"}})
	if e.stdout != w.home+" here 2" || e.text() != "[1] 1 2" || e.count != 2 {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": "stop('bad')", "context_id": "r"}); e.err["name"] != "simpleError" || e.err["value"] != "bad" || e.count != 3 {
		t.Errorf("%+v", e)
	}
	ctx, leave := context.WithCancel(t.Context())
	w.begin(t, ctx, object{"code": "cat('go\\n'); repeat {}", "language": "r"})
	leave()
	if e := w.run(t, object{"code": "length(kept)", "language": "r"}); e.text() != "[1] 2" {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": "quit()", "language": "r"}); e.err["name"] != "ContextRestarting" || !strings.Contains(e.err["value"].(string), "status 0") {
		t.Errorf("%+v", e)
	}
}

func TestJava(t *testing.T) {
	need(t, "jshell")
	w := newWorld(t)
	w.run(t, object{"code": "int kept = 2;", "language": "java"})
	code := `System.out.print(System.getenv("GLOBAL") + System.getenv("MINE") + System.getProperty("MINE")); kept + 1`
	if e := w.run(t, object{"code": code, "language": "java", "env_vars": object{"MINE": "2"}}); e.stdout != "here22" || e.text() != "3" || e.count != 2 {
		t.Errorf("%+v", e)
	}
	if e := w.run(t, object{"code": `System.getProperty("GLOBAL") + System.getProperty("MINE", "none")`, "language": "java"}); e.text() != "herenone" {
		t.Errorf("%+v", e)
	}
	for _, which := range []object{{"language": "java"}, {"context_id": "java"}} {
		which["code"] = `System.out.println("hé")`
		if e := w.run(t, which); !slices.Equal(e.outputs, []string{"hé", "\n"}) {
			t.Errorf("%v: %+v", which, e)
		}
	}
	if e := w.run(t, object{"code": "int x = 10 / 0;", "context_id": "java"}); e.err["name"] != "EvalException" || !strings.Contains(e.err["value"].(string), "by zero") {
		t.Errorf("%+v", e)
	}
	ctx, leave := context.WithCancel(t.Context())
	w.begin(t, ctx, object{"code": "System.out.println(1); while (true) {}", "language": "java"})
	leave()
	if e := w.run(t, object{"code": "kept", "language": "java"}); e.text() != "2" {
		t.Errorf("%+v", e)
	}
}

func TestALanguageThatIsMissing(t *testing.T) {
	w := newWorldWith(t, map[string]string{"PATH": t.TempDir()})
	for language, says := range map[string]string{"r": "no Rscript", "java": "no java", "bash": "no bash"} {
		want := "this sandbox's image or template has " + says + ", which kernels of " + language + " need"
		for _, path := range []string{"/execute", "/contexts"} {
			if status, body := w.do(t, http.MethodPost, path, object{"code": "1", "language": language}); status != http.StatusNotImplemented || !strings.Contains(body, want) {
				t.Errorf("%s %s: %d %s", path, language, status, body)
			}
		}
	}
}

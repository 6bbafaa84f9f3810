package interpreter_test

import (
	"context"
	"net/http"
	"os/exec"
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
	if e := w.run(t, object{"code": "kept.length", "language": "js"}); e.text() != "2" || time.Since(begun) > 5*time.Second {
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

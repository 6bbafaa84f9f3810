package interpreter_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/e2b/interpreter"
)

func TestAnybodyMakesOnlySoManyContexts(t *testing.T) {
	w := newWorld(t)
	free := w.handler.Occupy(w.id, interpreter.MaxContexts-2) // two are there from the start
	status, body := w.do(t, http.MethodPost, "/contexts", object{})
	if status != http.StatusTooManyRequests || !strings.Contains(body, "at most 64 contexts") {
		t.Errorf("one too many: %d %s", status, body)
	}
	free()
	if status, body := w.do(t, http.MethodPost, "/contexts", object{}); status != http.StatusOK {
		t.Errorf("then: %d %s", status, body)
	}
}

func TestABodyHasTheLengthThatItNeeds(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat(" ", 65<<10)
	if status, body := w.do(t, http.MethodPost, "/contexts", long+"{}"); status != http.StatusRequestEntityTooLarge {
		t.Errorf("a context: %d %s", status, body)
	}
	if status, body := w.do(t, http.MethodPost, "/execute", object{"code": "1+1" + long}); status != http.StatusOK {
		t.Errorf("code: %d %s", status, body)
	}
}

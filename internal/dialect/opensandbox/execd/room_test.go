package execd

import "testing"

func TestACellOfADeletedContextChangesNothingOfTheNext(t *testing.T) {
	r := &room{contexts: map[string]*codeContext{}}
	r.know("java", java)
	first := r.enter("java")
	if first == nil || r.enter("java") != nil {
		t.Fatal("a context is busy for all but one")
	}
	delete(r.contexts, "java")
	r.know("java", java)
	second := r.enter("java")
	kernel := &repl{}
	if halted, gone := r.sent("java", second, kernel); halted || gone {
		t.Fatal(halted, gone)
	}

	if halted, gone := r.sent("java", first, &repl{}); halted || !gone {
		t.Error(halted, gone)
	}
	r.forgo(first, kernel)
	r.leave(first)
	if r.enter("java") != nil {
		t.Error("the end of a cell of another context let a second cell into this one")
	}
	if r.repl("java") != kernel {
		t.Error("a cell of another context changed the kernel of this one")
	}
	r.leave(second)
	if r.enter("java") != second {
		t.Error("it stays busy")
	}
}

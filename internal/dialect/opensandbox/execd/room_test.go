package execd

import "testing"

func TestACellOfADeletedContextChangesNothingOfTheNext(t *testing.T) {
	r := &room{contexts: map[string]*codeContext{}}
	r.know("java", "java")
	first := r.enter("java")
	if first == nil || r.enter("java") != nil {
		t.Fatal("a context is busy for all but one")
	}
	delete(r.contexts, "java")
	r.know("java", "java")
	second := r.enter("java")
	if r.halt("java") {
		t.Error("a cell that has not begun can be interrupted")
	}

	if r.begin(first) {
		t.Error("the interrupt is another cell's")
	}
	r.leave(first)
	if r.enter("java") != nil {
		t.Error("the end of a cell of another context let a second cell into this one")
	}
	if !r.begin(second) || !r.halt("java") {
		t.Error("an early interrupt is forgotten")
	}
	r.leave(second)
	if r.enter("java") != second || r.begin(second) {
		t.Error("an interrupt reaches the cell after its own")
	}
}

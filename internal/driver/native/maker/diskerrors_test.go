package maker // inside: a real file system answers syncfs at once

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestAsk_LateFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &Maker{closed: make(chan struct{}), suspect: make(chan struct{}, 1)}
		var q syncQuestion
		asked, answer := 0, make(chan bool)
		hangs := func() bool { asked++; return <-answer }
		took := func(ask func() bool) (failed bool, d time.Duration) {
			began := time.Now()
			failed = ask()
			return failed, time.Since(began)
		}
		if failed, d := took(func() bool { return m.ask(&q, hangs) }); failed || d != syncPatience {
			t.Errorf("the first question: failed %v after %v, want false after %v", failed, d, syncPatience)
		}
		if failed, d := took(func() bool { return m.ask(&q, hangs) }); failed || d != 0 || asked != 1 {
			t.Errorf("while it is open: failed %v after %v, asked %d times; want false at once and 1", failed, d, asked)
		}
		answer <- true
		synctest.Wait()
		select {
		case <-m.suspect:
		default:
			t.Error("a late failure has the disks asked again: it has not")
		}
		if failed, d := took(func() bool { return m.ask(&q, hangs) }); !failed || d != 0 {
			t.Errorf("the late answer: failed %v after %v, want true at once", failed, d)
		}
		if m.ask(&q, func() bool { return false }) {
			t.Error("a new question is answered by the old answer")
		}
	})
}

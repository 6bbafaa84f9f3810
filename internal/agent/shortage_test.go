package agent

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestShortage_Explains(t *testing.T) {
	const never = -1 * time.Hour
	for name, c := range map[string]struct {
		word   time.Duration // after the death
		asked  time.Duration // after the death
		ok     bool
		answer time.Duration // after the question
	}{
		"the word came just before":                 {word: -time.Millisecond, ok: true},
		"a busy agent collects the process late":    {word: -8 * time.Second, ok: true},
		"the word is about another death":           {word: -11 * time.Second, answer: wordDelay},
		"a busy host tells late":                    {word: 900 * time.Millisecond, ok: true, answer: 900 * time.Millisecond},
		"the word came before the agent looks":      {word: time.Second, asked: 2 * time.Second, ok: true},
		"the host has nothing to tell":              {word: never, answer: wordDelay},
		"the word is too late for the client's end": {word: 2 * time.Second, answer: wordDelay},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := shortage{told: make(chan struct{}), ending: make(chan struct{})}
				time.Sleep(time.Minute)
				death := time.Now()
				if c.word < 0 {
					s.hear("a word")
					s.at = death.Add(c.word)
				} else {
					time.AfterFunc(c.word, func() { s.hear("a word") })
				}
				time.Sleep(c.asked)
				asked := time.Now()
				text, ok := s.explains(death)
				if took := time.Since(asked); ok != c.ok || took != c.answer || ok != (text == "a word") {
					t.Errorf("%q, %v after %v; want %v after %v", text, ok, took, c.ok, c.answer)
				}
				time.Sleep(time.Minute) // a word that is still to come
			})
		})
	}
	t.Run("the end of the agent is not held up", func(t *testing.T) {
		ending := make(chan struct{})
		close(ending)
		s := shortage{told: make(chan struct{}), ending: ending}
		synctest.Test(t, func(t *testing.T) {
			asked := time.Now()
			if _, ok := s.explains(asked); ok || time.Since(asked) != 0 {
				t.Errorf("explained: %v, after %v", ok, time.Since(asked))
			}
		})
	})
}

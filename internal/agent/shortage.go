package agent

import (
	"sync"
	"time"
)

// shortage keeps the latest word of the host that something here was killed for lack of memory. From inside, such a
// kill is a SIGKILL like any other.
type shortage struct {
	mu   sync.Mutex
	at   time.Time
	text string
	told chan struct{} // closed and replaced at each word

	ending <-chan struct{} // closed when the agent ends: no word is awaited any more

	count func() int // how often it happened so far, where that can be asked; else somebody tells
	known int        // of them, those that explain a death
}

func (s *shortage) hear(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.text = time.Now(), text
	close(s.told)
	s.told = make(chan struct{})
}

const (
	// wordDelay is how long the host's word may be behind the death that it explains.
	//
	// Of the ends that a client gets, only those by a SIGKILL that neither a client nor the agent sent
	// are this much later.
	wordDelay = time.Second
	// wordAhead is how long the agent may take to collect a dead process after the host's word.
	wordAhead = 10 * time.Second
)

// ask looks whether it happened again.
func (s *shortage) ask() {
	now := s.count()
	s.mu.Lock()
	more := now > s.known
	s.known = max(s.known, now)
	s.mu.Unlock()
	if more {
		s.hear("out of memory: the kernel ended a process at the sandbox's limit")
	}
}

// OutOfMemory tells whether a process that was killed just now was killed for lack of memory, and a sentence about that.
func (a *Agent) OutOfMemory() (text string, ok bool) { return a.memory.explains(time.Now()) }

// explains gives the word about a death at that moment, which may be on its way still.
func (s *shortage) explains(death time.Time) (text string, ok bool) {
	if s.count != nil {
		s.ask()
	}
	patience := time.NewTimer(wordDelay)
	defer patience.Stop()
	for {
		s.mu.Lock()
		text, told := s.text, s.told
		near := !s.at.IsZero() && s.at.After(death.Add(-wordAhead))
		s.mu.Unlock()
		if near || s.count != nil { // a count is never behind
			return text, near
		}
		select {
		case <-told:
		case <-patience.C:
			return "", false
		case <-s.ending:
			return "", false
		}
	}
}

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
}

func (s *shortage) hear(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.text = time.Now(), text
	close(s.told)
	s.told = make(chan struct{})
}

// wordDelay is how long the host's word may be behind the death that it explains.
const wordDelay = 100 * time.Millisecond

// explains gives the word about a death at that moment, which may be on its way still.
func (s *shortage) explains(death time.Time) (text string, ok bool) {
	patience := time.NewTimer(wordDelay)
	defer patience.Stop()
	for {
		s.mu.Lock()
		text, told := s.text, s.told
		near := !s.at.IsZero() && s.at.After(death.Add(-time.Second))
		s.mu.Unlock()
		if near {
			return text, true
		}
		select {
		case <-told:
		case <-patience.C:
			return "", false
		}
	}
}

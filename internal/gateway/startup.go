package gateway

import (
	"net/http"
	"strconv"
	"sync/atomic"
)

// startRetry is the Retry-After of requests that come before the server can answer them, in seconds.
const startRetry = 2

// Startup answers on a listener from the first moment: /healthz with 200, /readyz with 503 and what the server is busy
// with, every other path with 503. Serve hands over to the handler that answers from then on.
//
// A start can take minutes: it builds templates, migrates a database, waits for one. A connection that hangs until then
// looks to a liveness probe like a server that must be killed.
type Startup struct {
	reason atomic.Pointer[string]
	next   atomic.Pointer[http.Handler]
	refuse func(w http.ResponseWriter, message string) // after Retry-After was set
}

// NewStartup makes a Startup. refuse writes the 503 in the form that the listener's clients know; nil: the form that the
// clients of every dialect can read.
func NewStartup(refuse func(w http.ResponseWriter, message string)) *Startup {
	if refuse == nil {
		refuse = refuseEarly
	}
	s := &Startup{refuse: refuse}
	s.Say("the server is starting")
	return s
}

// Say sets the sentence that /readyz gives as its reason.
func (s *Startup) Say(reason string) { s.reason.Store(&reason) }

// Serve ends the start: h answers every request that comes from now on.
func (s *Startup) Serve(h http.Handler) { s.next.Store(&h) }

func (s *Startup) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if next := s.next.Load(); next != nil {
		(*next).ServeHTTP(w, r)
		return
	}
	w.Header().Set("X-Request-Id", requestID(r.Header.Get("X-Request-Id")))
	seen := watch(w, r)
	defer seen.leave()
	s.answer(seen, r)
}

func (s *Startup) answer(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == pathHealth {
		healthy(w, r)
		return
	}
	reason := *s.reason.Load()
	w.Header().Set("Retry-After", strconv.Itoa(startRetry))
	if r.URL.Path == pathReady {
		tell(w, http.StatusServiceUnavailable, notReady{readiness{Status: statusStarting, Checks: map[string]string{}}, unavailable(reason)})
		return
	}
	s.refuse(w, "the server is not ready yet: "+reason)
}

// refuseEarly says it in the words of every dialect.
func refuseEarly(w http.ResponseWriter, message string) {
	tell(w, http.StatusServiceUnavailable, map[string]any{"code": "STARTING", "message": message, "error": unavailable(message)})
}

func unavailable(message string) map[string]string {
	return map[string]string{"kind": "unavailable", "message": message}
}

package edge

import "net/http"

// strip takes out of a request how it named its sandbox.
func strip(h http.Header) {
	h.Del(headerID)
	h.Del(headerPort)
}

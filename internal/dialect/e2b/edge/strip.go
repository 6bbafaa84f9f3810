package edge

import (
	"net/http"

	"github.com/covehq/cove/internal/dialect/rawport"
)

// strip takes out of a request whatever is between the caller and us. Other people's tokens of the same header stay: what
// is behind the port may need them.
func strip(h http.Header) {
	for _, name := range []string{headerID, headerPort, headerTraffic} {
		h.Del(name)
	}
	rawport.StripKeys(h)
	rawport.StripTokens(h, headerAccess)
}

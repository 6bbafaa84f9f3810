package execd

import "net/http"

// Isolated sessions, a sandbox within a sandbox, are not served: clients that ask whether they are get an answer.

const whyNoIsolation = "isolated sessions are not served here; every sandbox is isolated, so create another one"

func isolation(c *call) error {
	return c.answer(map[string]any{
		"available": false, "isolator": "", "version": "", "message": whyNoIsolation,
		"setpriv_available": false, "userns_available": false, "commit_supported": false, "diff_supported": false,
	})
}

func noIsolation(*call) error {
	return &refusal{http.StatusNotImplemented, codeUnsupported, whyNoIsolation}
}

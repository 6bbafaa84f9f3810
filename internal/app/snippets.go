package app

import (
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/snippet"
)

// openSnippets has the API run code in fresh processes. By the time it is closed no request runs, and the Manager, which
// ends their sandboxes, is there still.
func (s *Server) openSnippets(api *cove.API, domain domain) {
	runner := snippet.New(domain, s.log)
	s.undo.add("end the sandboxes of snippets", runner.Close)
	api.SetSnippets(runner)
}

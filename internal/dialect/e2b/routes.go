package e2b

import (
	"net/http"

	"github.com/covehq/cove/internal/fault"
)

// route is one path of the API.
type route struct {
	pattern string
	handle  func(*API, *call) error
	public  bool // without a key
	streams bool // it bounds its body itself
}

var routes = []route{
	{pattern: "GET /health", public: true, handle: (*API).health},
	{pattern: "GET /teams", handle: (*API).teams},

	{pattern: "POST /sandboxes", handle: (*API).createV1},
	{pattern: "POST /v2/sandboxes", handle: (*API).createV2},
	{pattern: "GET /sandboxes", handle: (*API).listV1},
	{pattern: "GET /v2/sandboxes", handle: (*API).listV2},
	{pattern: "GET /sandboxes/metrics", handle: (*API).latestMetrics},
	{pattern: "GET /sandboxes/{sandbox}", handle: (*API).get},
	{pattern: "DELETE /sandboxes/{sandbox}", handle: (*API).kill},
	{pattern: "POST /sandboxes/{sandbox}/timeout", handle: (*API).setTimeout},
	{pattern: "POST /sandboxes/{sandbox}/refreshes", handle: (*API).refresh},
	{pattern: "POST /sandboxes/{sandbox}/pause", handle: (*API).pause},
	{pattern: "POST /sandboxes/{sandbox}/resume", handle: (*API).resume},
	{pattern: "POST /sandboxes/{sandbox}/connect", handle: (*API).connectV1},
	{pattern: "POST /v2/sandboxes/{sandbox}/connect", handle: (*API).connectV2},
	{pattern: "POST /sandboxes/{sandbox}/fork", handle: (*API).fork},
	{pattern: "PUT /sandboxes/{sandbox}/network", handle: (*API).setNetwork},
	{pattern: "GET /sandboxes/{sandbox}/metrics", handle: (*API).metrics},
	{pattern: "GET /sandboxes/{sandbox}/logs", handle: (*API).logsV1},
	{pattern: "GET /v2/sandboxes/{sandbox}/logs", handle: (*API).logsV2},

	{pattern: "POST /sandboxes/{sandbox}/snapshots", handle: (*API).snapshot},
	{pattern: "GET /snapshots", handle: (*API).listSnapshots},
	{pattern: "DELETE /templates/{template}", handle: (*API).removeTemplate},
	{pattern: "DELETE /templates/tags", streams: true, handle: (*API).build}, // whatever a snapshot is called

	{pattern: "/templates", streams: true, handle: (*API).build},
	{pattern: "/templates/", streams: true, handle: (*API).build},
	{pattern: "/default-templates", streams: true, handle: (*API).build},
	{pattern: "/v2/templates", streams: true, handle: (*API).build},
	{pattern: "/v2/templates/", streams: true, handle: (*API).build},
	{pattern: "/v3/templates", streams: true, handle: (*API).build},
	{pattern: "/v3/templates/", streams: true, handle: (*API).build},

	{pattern: "/volumes", handle: lacks("volumes")},
	{pattern: "/volumes/", handle: lacks("volumes")},
	{pattern: "/volumecontent/", public: true, handle: lacks("volumes")}, // its token is a volume's, and there is none
	{pattern: "/secrets", handle: lacks("secrets")},
	{pattern: "/secrets/", handle: lacks("secrets")},
	{pattern: "/api-keys", handle: lacks("keys; make them with `cove key`")},
	{pattern: "/api-keys/", handle: lacks("keys; make them with `cove key`")},
	{pattern: "/teams/", handle: lacks("figures of a whole team")},
}

// lacks answers for what E2B has and this server does not have yet.
func lacks(what string) func(*API, *call) error {
	return func(*API, *call) error {
		return fault.New(fault.Unsupported, "this server does not serve E2B's API for %s", what)
	}
}

func (a *API) health(c *call) error { return c.nothing() }

func (a *API) build(c *call) error {
	a.builder.Serve(c.w, c.r, c.who)
	return nil
}

// team is a tenant as E2B shows it: its only one.
type team struct {
	TeamID    string `json:"teamID"`
	Name      string `json:"name"`
	APIKey    string `json:"apiKey"`
	IsDefault bool   `json:"isDefault"`
}

// teams gives back the key that came with the request: no other one is known as text.
func (a *API) teams(c *call) error {
	return c.answer(http.StatusOK, []team{{TeamID: c.who.Tenant, Name: c.who.Tenant, APIKey: c.key, IsDefault: true}})
}

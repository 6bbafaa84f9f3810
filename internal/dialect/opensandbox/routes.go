package opensandbox

import "net/http"

// route is one path of the API.
type route struct {
	pattern string
	handle  func(*API, *call) error
}

var routes = []route{
	{"POST /v1/sandboxes", (*API).create},
	{"GET /v1/sandboxes", (*API).list},
	{"GET /v1/sandboxes/{sandbox}", (*API).get},
	{"DELETE /v1/sandboxes/{sandbox}", (*API).delete},
	{"PATCH /v1/sandboxes/{sandbox}/metadata", (*API).patchMetadata},
	{"POST /v1/sandboxes/{sandbox}/pause", (*API).pause},
	{"POST /v1/sandboxes/{sandbox}/resume", (*API).resume},
	{"POST /v1/sandboxes/{sandbox}/renew-expiration", (*API).renew},
	{"GET /v1/sandboxes/{sandbox}/endpoints/{port}", (*API).endpoint},
	{"/v1/sandboxes/{sandbox}/networkpolicy", (*API).networkPolicy},

	{"POST /v1/sandboxes/{sandbox}/snapshots", (*API).snapshot},
	{"GET /v1/snapshots", (*API).listSnapshots},
	{"GET /v1/snapshots/{snapshot}", (*API).getSnapshot},
	{"DELETE /v1/snapshots/{snapshot}", (*API).deleteSnapshot},

	{"GET /v1/sandboxes/{sandbox}/diagnostics/logs", (*API).diagnoseLogs},
	{"GET /v1/sandboxes/{sandbox}/diagnostics/events", (*API).diagnoseEvents},
	{"GET /v1/sandboxes/{sandbox}/diagnostics/inspect", (*API).inspect},
	{"GET /v1/sandboxes/{sandbox}/diagnostics/summary", (*API).summary},

	{"POST /v1/metrics/events", (*API).metrics},

	{"/v1/pools", lacks(codePools, "pools: a sandbox starts in milliseconds without one")},
	{"/v1/pools/", lacks(codePools, "pools: a sandbox starts in milliseconds without one")},
	{"/v1/templates", lacks(codeUnsupported, "templates; make an image with `cove image build`, or a snapshot")},
	{"/v1/templates/", lacks(codeUnsupported, "templates; make an image with `cove image build`, or a snapshot")},
}

// lacks answers for what OpenSandbox has and this server does not have.
func lacks(code, what string) func(*API, *call) error {
	return func(*API, *call) error {
		return told(http.StatusNotImplemented, code, "this server does not serve OpenSandbox's API for %s", what)
	}
}

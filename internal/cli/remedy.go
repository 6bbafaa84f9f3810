package cli

import (
	"cmp"
	"strings"

	"github.com/covehq/cove/client"
)

// remedies say what to do next about what the server said: the first whose kind and words fit. None is needed where the
// sentence itself says enough.
var remedies = []struct {
	kind  client.Kind
	words string // that the sentence holds; empty: any
	next  string
}{
	{client.NotFound, "no sandbox", "`cove ps` lists yours"}, // files and commands are not found too
	{client.NotFound, "no template", "`cove template list` lists those there are"},
	{client.NotFound, "in its registry", "check the name; what a registry keeps from strangers needs `cove login`"},
	{client.NotFound, "no image", "`cove image list` lists those that are here, `cove image pull` gets others"},
	{client.NotFound, "volume ", "`cove volume list` lists yours"},
	{client.Conflict, "is paused", "`cove resume ID` lets it go on"},
	{client.Denied, "operator", ""}, // no key can
	{client.Denied, "an address that", "check the name of the registry"},
	{client.Denied, "registry", "check the name, or log in with `cove login REGISTRY`"},
	{client.Denied, "", "use a key that may do this; `cove key create --admin` makes one"},
	{client.Unauthed, "", "set COVE_API_KEY; the server's own key is in server/api_key of its data directory"},
	{client.Gone, "", "`cove ps --all` lists what has ended, and why"},
	{client.DiskFull, "server's disk", "free some, also with `cove image prune`"},
	{client.Exhausted, "", "end a sandbox with `cove kill`, or raise the limit in the server's configuration"},
	{client.Unavailable, "host name", "check the name of the registry"},
	{client.Unavailable, "operator", ""},
	{client.Unavailable, "", "try again in a moment"},
	{client.Internal, "", "the server's log has the details"},
}

// remedy is what to do next about a failure; empty: nothing in particular.
func (a *invocation) remedy(err error) string {
	for _, r := range remedies {
		if r.kind == client.KindOf(err) && strings.Contains(err.Error(), r.words) {
			return strings.Replace(r.next, " ID`", " "+cmp.Or(a.sandbox, "ID")+"`", 1)
		}
	}
	return ""
}

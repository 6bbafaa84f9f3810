package agentsandbox_test

import (
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

// run is what a line of shell prints.
func run(t *testing.T, client *agentapi.Client, line string) (out string) {
	t.Helper()
	stream, err := client.Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", line}})
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		out += string(e.Data)
	}
	return out
}

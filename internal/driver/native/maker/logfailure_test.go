package maker

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestAnswer_FailedStartIsLogged(t *testing.T) {
	var logged bytes.Buffer
	m := &Maker{closing: true, log: slog.New(slog.NewTextHandler(&logged, nil))}
	r := wire.Request{Op: wire.OpStart, Start: &wire.Start{ID: "sb1", Tenant: "acme"}}
	response, _ := m.answer(t.Context(), r)
	if !fault.Is(response.Err(), fault.Unavailable) {
		t.Fatalf("a maker that shuts down answers a start with %v", response.Err())
	}
	for _, part := range []string{`msg="request failed"`, "op=" + string(wire.OpStart), "sandbox=sb1", "tenant=acme", `error="the maker is shutting down"`} {
		if !strings.Contains(logged.String(), part) {
			t.Errorf("the log lacks %s: %s", part, &logged)
		}
	}
}

func TestLogFailure_Kinds(t *testing.T) {
	for _, kind := range fault.Kinds {
		var logged bytes.Buffer
		m := &Maker{log: slog.New(slog.NewTextHandler(&logged, nil))}
		m.logFailure(wire.Request{Op: wire.OpStart, Start: &wire.Start{}}, fault.New(kind, "no"))
		host := kind == fault.Internal || kind == fault.Unavailable || kind == fault.Timeout
		if (logged.Len() > 0) != host {
			t.Errorf("%s: logged %q", kind, &logged)
		}
	}
	var logged bytes.Buffer
	m := &Maker{log: slog.New(slog.NewTextHandler(&logged, nil))}
	m.logFailure(wire.Request{Op: wire.OpFork, Fork: &sandbox.ForkRequest{Parent: "sb2"}}, errors.New("mount: no space"))
	if text := logged.String(); !strings.Contains(text, "sandbox=sb2") || !strings.Contains(text, "mount: no space") {
		t.Errorf("a failed fork: %s", text)
	}
}

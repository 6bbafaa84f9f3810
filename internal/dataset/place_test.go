package dataset_test

import (
	"context"
	"encoding/json"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
)

// desk is the directory /session/data of a sandbox, by an agent that knows two operations: the real one would write to the
// test's own machine. A value is where a link leads; empty: a file.
type desk struct {
	mu    sync.Mutex
	names map[string]string
	deny  bool // its user has closed it
}

func (d *desk) find(context.Context) (*agentapi.Client, error) {
	return agentapi.NewClient(func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go d.serve(theirs)
		return ours, nil
	}), nil
}

func (d *desk) serve(conn net.Conn) {
	defer conn.Close()
	f, err := agentapi.NewReader(conn).Read()
	if err != nil {
		return
	}
	req, err := agentapi.DecodeRequest(f)
	if err != nil {
		return
	}
	end := agentapi.End{Outcome: agentapi.OutcomeOK}
	value, err := d.do(req)
	if err != nil {
		end = agentapi.End{Outcome: agentapi.OutcomeRefused, Fault: &agentapi.Fault{Kind: fault.KindOf(err), Message: fault.Message(err)}}
	}
	end.Value, _ = json.Marshal(value)
	_ = agentapi.WriteJSON(conn, agentapi.FrameEnd, end)
}

func (d *desk) do(req agentapi.Request) (any, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.deny {
		return nil, fault.New(fault.Denied, "permission denied")
	}
	if req.Op == agentapi.OpList {
		p, _ := agentapi.DecodeParams[agentapi.ListParams](req)
		return d.list(p.Path), nil
	}
	p, err := agentapi.DecodeParams[agentapi.SymlinkParams](req)
	if err != nil || req.Op != agentapi.OpSymlink || path.Dir(p.Path) != "/session/data" || p.Root {
		return nil, fault.New(fault.Internal, "%s %+v", req.Op, p)
	}
	name := path.Base(p.Path)
	to, there := d.names[name]
	switch {
	case p.Remove && there && to == p.Target:
		delete(d.names, name)
	case p.Remove:
	case there && to != p.Target:
		return nil, fault.New(fault.Conflict, "already exists")
	default:
		d.names[name] = p.Target
	}
	return nil, nil
}

func (d *desk) list(dir string) []agentapi.Entry {
	entries := []agentapi.Entry{}
	for name, to := range d.names {
		e := agentapi.Entry{Name: name, Path: path.Join(dir, name), Type: agentapi.EntrySymlink, Target: to, Size: 3}
		if to == "" {
			e.Type = agentapi.EntryFile
		}
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b agentapi.Entry) int { return strings.Compare(a.Name, b.Name) })
	return entries
}

func (w *world) place(d *desk) {
	w.t.Helper()
	agent, _ := d.find(w.t.Context())
	if err := w.Place(w.t.Context(), acme, one, agent); err != nil {
		w.t.Fatal(err)
	}
}

func TestS4_68_WhatIsStagedIsInSessionData(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	d := &desk{names: map[string]string{"mine.parquet": ""}}
	for id, at := range map[string]string{"sales": "/session/data/sales.parquet", "mine": "/datasets/mine.parquet", "a.csv": "/session/data/a.csv"} {
		got, err := w.Stage(t.Context(), acme, one, dataset.Upload{ID: id, Body: strings.NewReader(id)}, d.find)
		if err != nil || got.Path != at {
			t.Errorf("%s: %+v %v", id, got, err)
		}
	}
	want := map[string]string{"sales.parquet": "/datasets/sales.parquet", "a.csv": "/datasets/a.csv", "mine.parquet": ""}
	if diff := cmp.Diff(want, d.names); diff != "" {
		t.Error(diff)
	}
	if err := w.Remove(t.Context(), acme, one, "a.csv", d.find); err != nil {
		t.Fatal(err)
	}
	if err := w.Remove(t.Context(), acme, one, "mine", d.find); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"sales.parquet": "/datasets/sales.parquet", "mine.parquet": ""}, d.names); diff != "" {
		t.Errorf("after two are removed: %s", diff)
	}
}

func TestPlaceMakesTheLinksOfANewSandbox(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "sales", "rows")
	w.stage(one, "mine", "rows")
	// A volume that outlived its sandbox: one link leads nowhere any more, one is the user's own.
	d := &desk{names: map[string]string{"mine.parquet": "", "old.csv": "/datasets/old.csv", "own": "/datasets/old.csv"}}
	w.place(d)
	w.place(d)
	if diff := cmp.Diff(map[string]string{"mine.parquet": "", "sales.parquet": "/datasets/sales.parquet", "own": "/datasets/old.csv"}, d.names); diff != "" {
		t.Error(diff)
	}
	sales := loaded("sales", "rows")
	sales.Path = "/session/data/sales.parquet"
	w.says("where they are", one, loaded("mine", "rows"), sales)
}

func TestASessionOpensWhateverItsUserDidToItsDirectory(t *testing.T) {
	w := newWorld(t, dataset.Config{})
	w.stage(one, "sales", "rows")
	w.place(&desk{deny: true})
	w.says("where it is", one, loaded("sales", "rows"))
}

func TestS4_82_S4_84_S4_86_FilesOfTheHostAreListedByID(t *testing.T) {
	d := &desk{names: map[string]string{"b.parquet": "", "a.csv": "", "a.b.parquet": "", "linked": "/etc"}}
	got, err := dataset.ListLocal(t.Context(), d.find)
	want := []dataset.Dataset{
		{ID: "a.b.parquet", File: "a.b.parquet", Status: dataset.Loaded, Path: "/data/a.b.parquet", Size: 3},
		{ID: "a.csv", File: "a.csv", Status: dataset.Loaded, Path: "/data/a.csv", Size: 3},
		{ID: "b", File: "b.parquet", Status: dataset.Loaded, Path: "/data/b.parquet", Size: 3},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(dataset.Dataset{}, "Updated")); diff != "" || err != nil {
		t.Errorf("%s %v", diff, err)
	}
}

// Package storetest is the contract of sandbox.Store, auth.KeyStore and of dialects' documents as tests that every database runs.
package storetest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Store is everything a database keeps for the domain.
type Store interface {
	sandbox.Store
	auth.KeyStore

	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DocumentIDs(ctx context.Context, tenant, kind string) ([]string, error)
	DocumentOwners(ctx context.Context, kind string) ([]string, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error

	JoinServers(ctx context.Context, server sandbox.Server) error
	LeaveServers(ctx context.Context, id string) error
	Beat(ctx context.Context, id string, dead time.Duration) ([]sandbox.Server, []sandbox.Record, error)
	Owner(ctx context.Context, id string) (string, error)
	Secret(ctx context.Context, name string, fresh []byte) ([]byte, error)
	SwapSecret(ctx context.Context, name string, old, fresh []byte) ([]byte, error)
}

// Run checks a store against the contract. Each call of open gives an empty one and sees to its end.
func Run(t *testing.T, open func(t *testing.T) Store) {
	for name, claim := range map[string]func(*testing.T, Store){
		"a sandbox comes back as it was stored":                          roundTrip,
		"a sandbox without optional fields comes back as it was stored":  roundTripBare,
		"an unknown sandbox is not found":                                unknown,
		"a save replaces what can change":                                save,
		"a pause is stored with what was left of the lifetime":           pause,
		"what has ended stays as it is":                                  endedStays,
		"a failed write leaves no event":                                 writesWhole,
		"several are written at once":                                    writesSeveral,
		"a key belongs to one living sandbox of a tenant":                uniqueKey,
		"an idempotency key belongs to one living sandbox of a tenant":   uniqueIdempotency,
		"the living are those that have not ended, oldest first":         living,
		"a listing has every sandbox of its tenant once, newest first":   pages,
		"an ascending listing has every sandbox once, oldest first":      pagesAscending,
		"sandboxes of one moment are listed by their ids, both ways":     pagesOfOneMoment,
		"a listing begins with a moment, which belongs to it":            startedAfter,
		"a document comes back as it was put, and is replaced by a put":  documents,
		"documents are apart by tenant and kind, oldest first":           documentsApart,
		"a document has a name and an end to its size":                   badDocuments,
		"a cursor stays good while rows come and go":                     pagesUnderChange,
		"a listing filters by state, template, key and metadata":         filters,
		"a cursor that was never given out is invalid":                   badCursor,
		"events come in order, after a number, by sandbox and by tenant": events,
		"event numbers rise and are never used again":                    eventNumbers,
		"a prune removes only what ended before, with its events":        prune,
		"a tenant's prune keeps the newest, with their events":           pruneTenant,
		"many writers at once lose nothing":                              concurrent,
		"a key record comes back as it was stored":                       keyRoundTrip,
		"a revoked key keeps its first time":                             revoke,
		"another tenant's key cannot be revoked":                         revokeForeign,
		"a tenant's keys are listed oldest first":                        listKeys,
		"servers are listed oldest first until they leave":               servers,
		"a server that is silent for too long is expelled":               expelled,
		"who was away himself expels nobody":                             judge,
		"what belongs to nobody is given to the first server, once":      inheritance,
		"a server changes nothing that belongs to another":               fenced,
		"a server that is alone gets everything":                         gather,
		"a living sandbox is found by its key or its idempotency key":    holder,
		"a tenant has no more sandboxes than it may have":                quota,
		"a secret is the first server's":                                 secret,
	} {
		t.Run(name, func(t *testing.T) { claim(t, open(t)) })
	}
}

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

func full(id string) sandbox.Record {
	return sandbox.Record{
		Sandbox: sandbox.Sandbox{
			ID: id, Tenant: "acme", Template: "python", TemplateDigest: "sha256:ab", Key: "key-" + id, State: sandbox.StateRunning,
			CreatedAt: epoch, StartedAt: epoch.Add(time.Second), Deadline: epoch.Add(time.Hour), LastUsed: epoch.Add(time.Minute),
			IdleTimeout: 90 * time.Second, IdleAction: sandbox.IdlePause, AutoResume: true, ForkedFrom: "sb0",
			DeadlineAction: sandbox.IdlePause, ColdPause: true, Cold: true, ResumeLifetime: 5*time.Minute + time.Nanosecond,
			Annotations: map[string]string{"e2b": `{"it's": "JSON"}`, "other": ""},
			Limits:      template.Limits{CPUs: 1.5, MemoryBytes: 1 << 30, Pids: 64, DiskBytes: 1 << 31, OpenFiles: 256},
			Metadata:    map[string]string{"user": "42", `it's "odd" %_`: "ja 'so' \u2028 🦭", "empty": ""},
			Network: policy.Network{Mode: policy.List, Allow: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
				Deny: []netip.Prefix{netip.MustParsePrefix("10.1.2.3/32")}},
			Storage: sandbox.StorageDurable,
			Mounts:  []sandbox.Mount{{Kind: sandbox.MountVolume, Source: "data", SubPath: "a/b", Target: "/data", ReadOnly: true}},
		},
		IdempotencyKey: "idem-" + id, SpecDigest: "sha256:cd", BootID: "boot-1", Server: "sv1",
	}
}

func bare(id string) sandbox.Record {
	return sandbox.Record{Sandbox: sandbox.Sandbox{
		ID: id, Tenant: "acme", Template: "base", State: sandbox.StateStarting, CreatedAt: epoch,
		Network: policy.Network{Mode: policy.Internet}, Storage: sandbox.StorageVolatile,
	}}
}

func ended(r sandbox.Record, at time.Time) sandbox.Record {
	r.State, r.EndedAt, r.Cause, r.CauseMessage = sandbox.StateEnded, at, sandbox.CauseOOM, "python3 (pid 17)"
	r.Usage = sandbox.Usage{CPUMS: 12, MemoryBytes: 3, PeakBytes: 4, Pids: 5, DiskBytes: 6, OOMKills: 1}
	return r
}

func event(r sandbox.Record, kind sandbox.LifecycleType) sandbox.LifecycleEvent {
	return sandbox.LifecycleEvent{Sandbox: r.ID, Tenant: r.Tenant, Type: kind, At: epoch}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, kind fault.Kind) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Fatalf("error is %v (%s), want kind %s", err, fault.KindOf(err), kind)
	}
}

func wantSame[T any](t *testing.T, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Fatalf("got unlike want (-want +got):\n%s", diff)
	}
}

func wantStored(t *testing.T, s Store, want sandbox.Record) {
	t.Helper()
	got, err := s.Get(t.Context(), want.ID)
	must(t, err)
	wantSame(t, got, want)
}

func roundTrip(t *testing.T, s Store) {
	must(t, s.Insert(t.Context(), full("sb1")))
	wantStored(t, s, full("sb1"))
}

func roundTripBare(t *testing.T, s Store) {
	must(t, s.Insert(t.Context(), bare("sb1")))
	wantStored(t, s, bare("sb1"))
}

func unknown(t *testing.T, s Store) {
	_, err := s.Get(t.Context(), "sb1")
	wantKind(t, err, fault.NotFound)
	wantKind(t, s.Save(t.Context(), full("sb1")), fault.NotFound)
}

func save(t *testing.T, s Store) {
	r := full("sb1")
	must(t, s.Insert(t.Context(), r))
	r.State, r.Cause, r.CauseMessage = sandbox.StateStopping, sandbox.CauseIdle, "why"
	r.Deadline, r.LastUsed, r.StartedAt = time.Time{}, epoch.Add(time.Hour), epoch.Add(2*time.Second)
	r.Network = policy.Network{Mode: policy.None}
	r.Limits.Pids, r.Metadata, r.IdleTimeout, r.BootID = 7, map[string]string{"a": "b"}, 0, "boot-2"
	r.Annotations, r.Cold = map[string]string{"c": "d"}, false
	must(t, s.Save(t.Context(), r))
	wantStored(t, s, r)
	r = ended(r, epoch.Add(3*time.Hour))
	must(t, s.Save(t.Context(), r))
	wantStored(t, s, r)
}

func pause(t *testing.T, s Store) {
	r := full("sb1")
	must(t, s.Insert(t.Context(), r))
	for _, left := range []time.Duration{90*time.Minute + time.Nanosecond, -1} {
		r.State, r.PausedAt, r.Unspent, r.AutoResume = sandbox.StatePaused, epoch.Add(time.Minute), left, false
		must(t, s.Save(t.Context(), r))
		wantStored(t, s, r)
	}
	r.State, r.PausedAt, r.Unspent, r.AutoResume = sandbox.StateRunning, time.Time{}, 0, true
	must(t, s.Save(t.Context(), r))
	wantStored(t, s, r)
}

func endedStays(t *testing.T, s Store) {
	r := ended(full("sb1"), epoch)
	must(t, s.Insert(t.Context(), full("sb1")))
	must(t, s.Save(t.Context(), r, event(r, sandbox.LifecycleEnded)))
	again := r
	again.Cause = sandbox.CauseKilled
	wantKind(t, s.Save(t.Context(), again, event(r, sandbox.LifecycleEnded)), fault.Conflict)
	wantStored(t, s, r)
	got, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 10)
	must(t, err)
	if len(got) != 1 {
		t.Fatalf("%d events after two ends, want 1", len(got))
	}
}

func writesWhole(t *testing.T, s Store) {
	r := full("sb1")
	must(t, s.Insert(t.Context(), r))
	wantKind(t, s.Insert(t.Context(), r, event(r, sandbox.LifecycleCreated)), fault.Conflict)
	missing := full("sb2")
	wantKind(t, s.Save(t.Context(), missing, event(missing, sandbox.LifecycleStarted)), fault.NotFound)
	fresh := full("sb3")
	wantKind(t, s.InsertAll(t.Context(), []sandbox.Entry{{Record: fresh, Events: []sandbox.LifecycleEvent{event(fresh, sandbox.LifecycleCreated)}}, {Record: r}}), fault.Conflict)
	changed := r
	changed.Metadata = map[string]string{"changed": "yes"}
	wantKind(t, s.SaveAll(t.Context(), []sandbox.Entry{{Record: changed, Events: []sandbox.LifecycleEvent{event(r, sandbox.LifecycleStarted)}}, {Record: missing}}), fault.NotFound)
	_, err := s.Get(t.Context(), "sb3")
	wantKind(t, err, fault.NotFound)
	wantStored(t, s, r)
	got, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 10)
	must(t, err)
	wantSame(t, got, nil)
}

func writesSeveral(t *testing.T, s Store) {
	all := []sandbox.Entry{}
	for _, id := range []string{"sb1", "sb2"} {
		r := bare(id)
		all = append(all, sandbox.Entry{Record: r, Events: []sandbox.LifecycleEvent{event(r, sandbox.LifecycleCreated)}})
	}
	must(t, s.InsertAll(t.Context(), all))
	for i := range all {
		all[i].Record.Metadata = map[string]string{"changed": "yes"}
	}
	must(t, s.SaveAll(t.Context(), all))
	for _, e := range all {
		wantStored(t, s, e.Record)
	}
}

func uniqueKey(t *testing.T, s Store) {
	named := func(id, tenant string) sandbox.Record {
		r := bare(id)
		r.Tenant, r.Key = tenant, "the-key"
		return r
	}
	uniqueClaim(t, s, named)
}

func uniqueIdempotency(t *testing.T, s Store) {
	named := func(id, tenant string) sandbox.Record {
		r := bare(id)
		r.Tenant, r.IdempotencyKey = tenant, "the-key"
		return r
	}
	uniqueClaim(t, s, named)
}

func uniqueClaim(t *testing.T, s Store, named func(id, tenant string) sandbox.Record) {
	must(t, s.Insert(t.Context(), named("sb1", "acme")))
	wantKind(t, s.Insert(t.Context(), named("sb2", "acme")), fault.Conflict)
	must(t, s.Insert(t.Context(), named("sb3", "globex")))
	must(t, s.Save(t.Context(), ended(named("sb1", "acme"), epoch)))
	must(t, s.Insert(t.Context(), named("sb4", "acme")))
}

func living(t *testing.T, s Store) {
	first, second, third, fourth := full("sb1"), full("sb2"), bare("sb3"), full("sb4")
	third.Tenant, third.State, third.Cause = "globex", sandbox.StateStopping, sandbox.CauseKilled
	fourth.State, fourth.PausedAt, fourth.Unspent = sandbox.StatePaused, epoch, time.Minute
	for _, r := range []sandbox.Record{first, second, third, fourth} {
		must(t, s.Insert(t.Context(), r))
	}
	must(t, s.Save(t.Context(), ended(second, epoch)))
	got, err := s.Living(t.Context())
	must(t, err)
	wantSame(t, got, []sandbox.Record{first, third, fourth})
}

// fill inserts sandboxes whose numbers are the order of their creation; that of their rows is another.
func fill(t *testing.T, s Store, from, to int) {
	t.Helper()
	for i := to; i >= from; i-- {
		must(t, s.Insert(t.Context(), later(bare(fmt.Sprintf("sb%02d", i)), i)))
	}
}

func later(r sandbox.Record, us int) sandbox.Record {
	r.CreatedAt = epoch.Add(time.Duration(us) * time.Microsecond)
	return r
}

func ids(t *testing.T, s Store, q sandbox.ListQuery) (got []string) {
	t.Helper()
	for {
		page, err := s.List(t.Context(), "acme", q)
		must(t, err)
		if q.Limit > 0 && len(page.Items) > q.Limit {
			t.Fatalf("page has %d items, limit is %d", len(page.Items), q.Limit)
		}
		for _, sb := range page.Items {
			got = append(got, sb.ID)
		}
		if page.Next == "" {
			return got
		}
		q.Cursor = page.Next
	}
}

func pages(t *testing.T, s Store) {
	page, err := s.List(t.Context(), "acme", sandbox.ListQuery{})
	must(t, err)
	if len(page.Items) != 0 || page.Next != "" {
		t.Fatalf("an empty store lists %v", page)
	}
	fill(t, s, 1, 6)
	foreign := bare("sbx")
	foreign.Tenant = "globex"
	must(t, s.Insert(t.Context(), foreign))
	want := []string{"sb06", "sb05", "sb04", "sb03", "sb02", "sb01"}
	for _, limit := range []int{0, 1, 2, 5, 6, 7} {
		wantSame(t, ids(t, s, sandbox.ListQuery{Limit: limit}), want)
	}
}

func pagesAscending(t *testing.T, s Store) {
	fill(t, s, 1, 6)
	page, err := s.List(t.Context(), "acme", sandbox.ListQuery{Limit: 2, Ascending: true})
	must(t, err)
	for _, limit := range []int{0, 1, 2, 5, 6, 7} {
		got := ids(t, s, sandbox.ListQuery{Limit: limit, Ascending: true})
		wantSame(t, got, []string{"sb01", "sb02", "sb03", "sb04", "sb05", "sb06"})
	}
	fill(t, s, 7, 8)                                                   // those that come are seen
	must(t, s.Save(t.Context(), ended(later(bare("sb02"), 2), epoch))) // the cursor's own row goes
	if _, err := s.Prune(t.Context(), epoch.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	got := ids(t, s, sandbox.ListQuery{Limit: 3, Ascending: true, Cursor: page.Next})
	wantSame(t, got, []string{"sb03", "sb04", "sb05", "sb06", "sb07", "sb08"})
}

func pagesOfOneMoment(t *testing.T, s Store) {
	for _, id := range []string{"sb3", "sb1", "sb2"} {
		must(t, s.Insert(t.Context(), later(bare(id), 1)))
	}
	must(t, s.Insert(t.Context(), later(bare("sb0"), 0)))
	must(t, s.Insert(t.Context(), later(bare("sb9"), 2)))
	for _, limit := range []int{0, 1, 2} {
		wantSame(t, ids(t, s, sandbox.ListQuery{Limit: limit}), []string{"sb9", "sb1", "sb2", "sb3", "sb0"})
		wantSame(t, ids(t, s, sandbox.ListQuery{Limit: limit, Ascending: true}), []string{"sb0", "sb1", "sb2", "sb3", "sb9"})
	}
}

func startedAfter(t *testing.T, s Store) {
	fill(t, s, 1, 4)
	from := sandbox.ListQuery{StartedAfter: epoch.Add(3 * time.Microsecond), Limit: 1}
	wantSame(t, ids(t, s, from), []string{"sb04", "sb03"})
	from.Ascending = true
	wantSame(t, ids(t, s, from), []string{"sb03", "sb04"})
	from.StartedAfter = epoch.Add(time.Hour)
	wantSame(t, ids(t, s, from), nil)
}

func documents(t *testing.T, s Store) {
	ctx := t.Context()
	for _, body := range []string{`{"a": 1}`, "", "\x00\xff binary"} {
		must(t, s.PutDocument(ctx, "acme", "tag", "it's: odd/🦭", []byte(body)))
		got, err := s.Document(ctx, "acme", "tag", "it's: odd/🦭")
		must(t, err)
		wantSame(t, string(got), body)
	}
	all, err := s.Documents(ctx, "acme", "tag")
	must(t, err)
	if len(all) != 1 || all[0].ID != "it's: odd/🦭" || all[0].Created.IsZero() || all[0].Updated.Before(all[0].Created) {
		t.Fatalf("three puts of one document list as %+v", all)
	}
	must(t, s.DeleteDocument(ctx, "acme", "tag", "it's: odd/🦭"))
	wantKind(t, s.DeleteDocument(ctx, "acme", "tag", "it's: odd/🦭"), fault.NotFound)
	_, err = s.Document(ctx, "acme", "tag", "it's: odd/🦭")
	wantKind(t, err, fault.NotFound)
}

func documentsApart(t *testing.T, s Store) {
	ctx := t.Context()
	for _, d := range [][3]string{{"acme", "tag", "b"}, {"acme", "tag", "a"}, {"acme", "build", "b"}, {"globex", "tag", "b"}} {
		must(t, s.PutDocument(ctx, d[0], d[1], d[2], []byte(d[0]+d[1]+d[2])))
	}
	must(t, s.PutDocument(ctx, "acme", "tag", "b", []byte("again"))) // which makes it no younger
	got, err := s.Documents(ctx, "acme", "tag")
	must(t, err)
	if len(got) != 2 || got[0].ID != "b" || string(got[0].Body) != "again" || got[1].ID != "a" {
		t.Fatalf("documents are %+v", got)
	}
	ids, err := s.DocumentIDs(ctx, "acme", "tag")
	must(t, err)
	wantSame(t, ids, []string{"b", "a"})
	must(t, s.DeleteDocument(ctx, "acme", "build", "b"))
	for _, other := range [][2]string{{"acme", "tag"}, {"globex", "tag"}} {
		_, err := s.Document(ctx, other[0], other[1], "b")
		must(t, err)
	}
	none, err := s.Documents(ctx, "initech", "tag")
	must(t, err)
	wantSame(t, none, nil)
	owners, err := s.DocumentOwners(ctx, "tag")
	must(t, err)
	wantSame(t, owners, []string{"acme", "globex"})
}

func badDocuments(t *testing.T, s Store) {
	for _, name := range [][3]string{{"", "k", "i"}, {"t", "", "i"}, {"t", "k", ""}} {
		wantKind(t, s.PutDocument(t.Context(), name[0], name[1], name[2], nil), fault.Invalid)
	}
	wantKind(t, s.PutDocument(t.Context(), "t", "k", "i", make([]byte, 1<<20+1)), fault.Invalid)
	must(t, s.PutDocument(t.Context(), "t", "k", "i", make([]byte, 1<<20)))
}

func pagesUnderChange(t *testing.T, s Store) {
	fill(t, s, 1, 6)
	page, err := s.List(t.Context(), "acme", sandbox.ListQuery{Limit: 2})
	must(t, err)
	fill(t, s, 7, 8)                                                   // newer than the cursor
	must(t, s.Save(t.Context(), ended(later(bare("sb05"), 5), epoch))) // the cursor's own row goes
	if _, err := s.Prune(t.Context(), epoch.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	wantSame(t, ids(t, s, sandbox.ListQuery{Limit: 3, Cursor: page.Next}), []string{"sb04", "sb03", "sb02", "sb01"})
}

func filters(t *testing.T, s Store) {
	must(t, s.Insert(t.Context(), later(full("sb1"), 1)))
	must(t, s.Insert(t.Context(), later(bare("sb2"), 2)))
	must(t, s.Insert(t.Context(), later(full("sb3"), 3)))
	must(t, s.Save(t.Context(), ended(later(full("sb3"), 3), epoch)))
	paused := later(bare("sb4"), 4)
	paused.State, paused.Template = sandbox.StatePaused, "other"
	must(t, s.Insert(t.Context(), paused))
	odd := `it's "odd" %_`
	for name, c := range map[string]struct {
		q    sandbox.ListQuery
		want []string
	}{
		"one state":               {sandbox.ListQuery{States: []sandbox.State{sandbox.StateRunning}}, []string{"sb1"}},
		"paused":                  {sandbox.ListQuery{States: []sandbox.State{sandbox.StatePaused}}, []string{"sb4"}},
		"two states":              {sandbox.ListQuery{States: []sandbox.State{sandbox.StateStarting, sandbox.StateEnded}}, []string{"sb3", "sb2"}},
		"template":                {sandbox.ListQuery{Template: "base"}, []string{"sb2"}},
		"template in other words": {sandbox.ListQuery{Template: `{"it's": "JSON"}`, TemplateIn: "e2b"}, []string{"sb3", "sb1"}},
		"template in none":        {sandbox.ListQuery{Template: "base", TemplateIn: "e2b"}, []string{"sb2"}},
		"template in no words":    {sandbox.ListQuery{Template: "python", TemplateIn: "e2b"}, nil},
		"key":                     {sandbox.ListQuery{Key: "key-sb3"}, []string{"sb3"}},
		"metadata":                {sandbox.ListQuery{Metadata: map[string]string{"user": "42"}}, []string{"sb3", "sb1"}},
		"odd metadata":            {sandbox.ListQuery{Metadata: map[string]string{odd: full("").Metadata[odd], "user": "42"}}, []string{"sb3", "sb1"}},
		"an empty value":          {sandbox.ListQuery{Metadata: map[string]string{"empty": ""}}, []string{"sb3", "sb1"}},
		"a number is not a text":  {sandbox.ListQuery{Metadata: map[string]string{"user": "42.0"}}, nil},
		"without an annotation":   {sandbox.ListQuery{Without: "e2b"}, []string{"sb4", "sb2"}},
		"without what none has":   {sandbox.ListQuery{Without: "value"}, []string{"sb4", "sb3", "sb2", "sb1"}},
		"a cause":                 {sandbox.ListQuery{Causes: []sandbox.Cause{sandbox.CauseOOM, sandbox.CauseExited}}, []string{"sb3"}},
		"no such cause":           {sandbox.ListQuery{Causes: []sandbox.Cause{sandbox.CauseKilled}}, nil},
		"half a match":            {sandbox.ListQuery{Metadata: map[string]string{"user": "42", "missing": ""}}, nil},
		"all at once": {sandbox.ListQuery{States: []sandbox.State{sandbox.StateEnded}, Template: "python", Key: "key-sb3",
			Metadata: map[string]string{"user": "42"}}, []string{"sb3"}},
	} {
		t.Run(name, func(t *testing.T) {
			wantSame(t, ids(t, s, c.q), c.want)
			c.q.Limit = 1
			wantSame(t, ids(t, s, c.q), c.want)
		})
	}
}

func badCursor(t *testing.T, s Store) {
	for _, cursor := range []string{"no!", "-5", "0", "' OR 1=1", "1", "1.", ".sb1", "0.sb1", "-5.sb1", "01.sb1", "1A.sb1"} {
		_, err := s.List(t.Context(), "acme", sandbox.ListQuery{Cursor: cursor})
		wantKind(t, err, fault.Invalid)
	}
}

func events(t *testing.T, s Store) {
	a, b, foreign := full("sb1"), bare("sb2"), bare("sb3")
	foreign.Tenant = "globex"
	must(t, s.Insert(t.Context(), a, event(a, sandbox.LifecycleCreated)))
	must(t, s.Insert(t.Context(), b, event(b, sandbox.LifecycleCreated)))
	must(t, s.Insert(t.Context(), foreign, event(foreign, sandbox.LifecycleCreated)))
	last := sandbox.LifecycleEvent{Sandbox: "sb1", Tenant: "acme", Type: sandbox.LifecycleEnded, At: epoch.Add(time.Hour),
		Deadline: epoch.Add(2 * time.Hour), Cause: sandbox.CauseOOM, Message: "python3"}
	must(t, s.Save(t.Context(), ended(a, epoch), event(a, sandbox.LifecycleLifetime), last))
	read := func(q sandbox.EventQuery, limit int) []sandbox.LifecycleEvent {
		got, err := s.Events(t.Context(), "acme", q, limit)
		must(t, err)
		return got
	}
	all := read(sandbox.EventQuery{}, 10)
	want := []sandbox.LifecycleEvent{event(a, sandbox.LifecycleCreated), event(b, sandbox.LifecycleCreated), event(a, sandbox.LifecycleLifetime), last}
	if len(all) != len(want) {
		t.Fatalf("%d events, want %d: %v", len(all), len(want), all)
	}
	for i := range want {
		want[i].Seq = all[i].Seq
	}
	wantSame(t, all, want)
	wantSame(t, read(sandbox.EventQuery{}, 2), all[:2])
	wantSame(t, read(sandbox.EventQuery{After: all[1].Seq}, 10), all[2:])
	wantSame(t, read(sandbox.EventQuery{Sandbox: "sb2"}, 10), all[1:2])
	wantSame(t, read(sandbox.EventQuery{Sandbox: "sb3"}, 10), nil)
	wantSame(t, read(sandbox.EventQuery{Last: true}, 10), all[3:])
	wantSame(t, read(sandbox.EventQuery{Last: true, Sandbox: "sb2"}, 10), all[1:2])
	wantSame(t, read(sandbox.EventQuery{Last: true, After: all[3].Seq}, 10), nil)
}

func eventNumbers(t *testing.T, s Store) {
	r := bare("sb1")
	must(t, s.Insert(t.Context(), r, event(r, sandbox.LifecycleCreated)))
	must(t, s.Save(t.Context(), ended(r, epoch), event(r, sandbox.LifecycleEnded)))
	before, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 10)
	must(t, err)
	if _, err := s.Prune(t.Context(), epoch.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	next := bare("sb2")
	must(t, s.Insert(t.Context(), next, event(next, sandbox.LifecycleCreated)))
	after, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 10)
	must(t, err)
	if before[1].Seq <= before[0].Seq || len(after) != 1 || after[0].Seq <= before[1].Seq {
		t.Fatalf("numbers do not rise: %v then %v", before, after)
	}
}

func prune(t *testing.T, s Store) {
	old, young, lives := bare("sb1"), later(bare("sb2"), 2), later(bare("sb3"), 3)
	for _, r := range []sandbox.Record{old, young, lives} {
		must(t, s.Insert(t.Context(), r, event(r, sandbox.LifecycleCreated)))
	}
	must(t, s.Save(t.Context(), ended(old, epoch)))
	must(t, s.Save(t.Context(), ended(young, epoch.Add(time.Hour))))
	n, err := s.Prune(t.Context(), epoch.Add(time.Hour))
	must(t, err)
	if n != 1 {
		t.Fatalf("pruned %d, want 1", n)
	}
	wantSame(t, ids(t, s, sandbox.ListQuery{}), []string{"sb3", "sb2"})
	got, err := s.Events(t.Context(), "acme", sandbox.EventQuery{Sandbox: "sb1"}, 10)
	must(t, err)
	wantSame(t, got, nil)
}

func pruneTenant(t *testing.T, s Store) {
	const many = 1003 // more than one transaction removes
	for i := range many {
		r := bare(fmt.Sprintf("sb%04d", i))
		if i == many-1 {
			r.Tenant = "globex"
		}
		must(t, s.Insert(t.Context(), r, event(r, sandbox.LifecycleCreated)))
		if i > 0 { // the first one lives
			must(t, s.Save(t.Context(), ended(r, epoch.Add(time.Duration(i)*time.Second))))
		}
	}
	for _, want := range []int{many - 2 - 3, 0} {
		n, err := s.PruneTenant(t.Context(), "acme", 3)
		must(t, err)
		if n != want {
			t.Fatalf("pruned %d, want %d", n, want)
		}
		wantSame(t, slices.Sorted(slices.Values(ids(t, s, sandbox.ListQuery{}))), []string{"sb0000", "sb0999", "sb1000", "sb1001"})
		got, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 10)
		must(t, err)
		if len(got) != 4 || got[0].Sandbox != "sb0000" || got[1].Sandbox != "sb0999" {
			t.Errorf("events are %v", got)
		}
	}
	if _, err := s.Get(t.Context(), "sb1002"); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
}

func concurrent(t *testing.T, s Store) {
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			r := full(fmt.Sprintf("sb%02d", i))
			if err := s.Insert(context.Background(), r, event(r, sandbox.LifecycleCreated)); err != nil {
				t.Error(err)
			}
			if _, err := s.Get(context.Background(), r.ID); err != nil {
				t.Error(err)
			}
			if err := s.Save(context.Background(), ended(r, epoch), event(r, sandbox.LifecycleEnded)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	got, err := s.Events(t.Context(), "acme", sandbox.EventQuery{}, 100)
	must(t, err)
	if n := len(ids(t, s, sandbox.ListQuery{})); n != 32 || len(got) != 64 {
		t.Fatalf("%d sandboxes and %d events, want 32 and 64", n, len(got))
	}
}

func key(id string) auth.KeyRecord {
	return auth.KeyRecord{ID: id, Tenant: "acme", Name: "ci", Hash: "hash-" + id, Prefix: "e2b_ab", Admin: true, CreatedAt: epoch}
}

func keyRoundTrip(t *testing.T, s Store) {
	must(t, s.InsertKey(t.Context(), key("k1")))
	wantKind(t, s.InsertKey(t.Context(), key("k1")), fault.Conflict)
	must(t, s.TouchKey(t.Context(), "k1", epoch.Add(time.Minute)))
	want := key("k1")
	want.LastUsed = epoch.Add(time.Minute)
	got, err := s.KeyByHash(t.Context(), "hash-k1")
	must(t, err)
	wantSame(t, got, want)
	_, err = s.KeyByHash(t.Context(), "hash-k2")
	wantKind(t, err, fault.NotFound)
}

func revoke(t *testing.T, s Store) {
	must(t, s.InsertKey(t.Context(), key("k1")))
	must(t, s.RevokeKey(t.Context(), "acme", "k1", epoch))
	must(t, s.RevokeKey(t.Context(), "acme", "k1", epoch.Add(time.Hour)))
	got, err := s.KeyByHash(t.Context(), "hash-k1")
	must(t, err)
	if !got.RevokedAt.Equal(epoch) {
		t.Fatalf("revoked at %v, want %v", got.RevokedAt, epoch)
	}
}

func revokeForeign(t *testing.T, s Store) {
	must(t, s.InsertKey(t.Context(), key("k1")))
	wantKind(t, s.RevokeKey(t.Context(), "globex", "k1", epoch), fault.NotFound)
	wantKind(t, s.RevokeKey(t.Context(), "acme", "k2", epoch), fault.NotFound)
}

func listKeys(t *testing.T, s Store) {
	first, second, foreign := key("k2"), key("k1"), key("k3")
	second.CreatedAt, foreign.Tenant = epoch.Add(time.Second), "globex"
	for _, k := range []auth.KeyRecord{second, foreign, first} {
		must(t, s.InsertKey(t.Context(), k))
	}
	got, err := s.ListKeys(t.Context(), "acme")
	must(t, err)
	wantSame(t, got, []auth.KeyRecord{first, second})
}

package storetest

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/fault"
)

// RunArtifacts checks a store against what artifacts ask of it. Each call of open gives an empty one and sees to its end.
func RunArtifacts(t *testing.T, open func(t *testing.T) artifact.Index) {
	for name, claim := range map[string]func(*testing.T, artifact.Index){
		"an artifact comes back as it was added":                     artifactRoundTrip,
		"all are added or none":                                      artifactsWhole,
		"many are added at once, in their order":                     artifactsMany,
		"a listing has each once, newest first, and chooses":         artifactPages,
		"sums follow what is added, removed and expires":             artifactSums,
		"what expires goes in portions and tells its blobs":          artifactsExpire,
		"a blob is named as long as one artifact of its tenant does": blobsNamed,
		"what artifacts were made from is there as long as one is":   artifactDatasets,
		"what is settled is not asked for again":                     artifactsSettle,
		"keys: one signs, others count until their time":             linkKeys,
		"a first key is made once, however many try":                 firstLinkKey,
	} {
		t.Run(name, func(t *testing.T) { claim(t, open(t)) })
	}
}

func someArtifact(n int) artifact.Artifact {
	return artifact.Artifact{
		ID: fmt.Sprintf("art_%d", n), Tenant: "acme", Name: "plot.png", Path: "a/plot.png", MIME: "image/png", Size: 10, SHA256: fmt.Sprintf("sum%d", n),
		Created: epoch, Expires: epoch.Add(time.Hour), Source: "1 2 3 4",
		Origin: artifact.Origin{Session: "s1", Key: "chat", Sandbox: "sb1", Run: fmt.Sprintf("run%d", n), Cell: n, ToolCall: "call"},
	}
}

func addAll(t *testing.T, s artifact.Index, list ...artifact.Artifact) {
	t.Helper()
	must(t, s.AddArtifacts(t.Context(), list, nil))
}

func artifactRoundTrip(t *testing.T, s artifact.Index) {
	for _, want := range []artifact.Artifact{someArtifact(1), {ID: "art_bare", Tenant: "acme"}} {
		addAll(t, s, want)
		got, err := s.ArtifactByID(t.Context(), want.ID)
		must(t, err)
		wantSame(t, got, want)
	}
	_, err := s.ArtifactByID(t.Context(), "art_no")
	wantKind(t, err, fault.NotFound)
	wantKind(t, s.RemoveArtifact(t.Context(), "umbrella", "art_1"), fault.NotFound)
	must(t, s.RemoveArtifact(t.Context(), "acme", "art_1"))
	wantKind(t, s.RemoveArtifact(t.Context(), "acme", "art_1"), fault.NotFound)
}

func artifactsWhole(t *testing.T, s artifact.Index) {
	addAll(t, s, someArtifact(1))
	if err := s.AddArtifacts(t.Context(), []artifact.Artifact{someArtifact(2), someArtifact(1)}, nil); err == nil {
		t.Fatal("an id is there twice")
	}
	_, err := s.ArtifactByID(t.Context(), "art_2")
	wantKind(t, err, fault.NotFound)
	held, err := s.ArtifactsHeld(t.Context(), "acme", "s1")
	must(t, err)
	wantSame(t, held, artifact.Held{Tenant: 10, TenantFiles: 1, Session: 10, Files: 1})
}

func artifactsMany(t *testing.T, s artifact.Index) {
	var list []artifact.Artifact
	for i := range 130 {
		list = append(list, someArtifact(i))
	}
	addAll(t, s, list...)
	page, err := s.Artifacts(t.Context(), "acme", artifact.Query{Limit: len(list)})
	must(t, err)
	slices.Reverse(page.Artifacts)
	wantSame(t, page.Artifacts, list)
	held, err := s.ArtifactsHeld(t.Context(), "acme", "s1")
	must(t, err)
	wantSame(t, held, artifact.Held{Tenant: 1300, TenantFiles: 130, Session: 1300, Files: 130})
}

func artifactDatasets(t *testing.T, s artifact.Index) {
	from := []artifact.Dataset{{ID: "d", SHA256: "x"}, {ID: "host"}}
	want := func(tenant, id string, list []artifact.Dataset) {
		t.Helper()
		got, err := s.ArtifactDatasets(t.Context(), tenant, id)
		must(t, err)
		wantSame(t, got, list)
	}
	must(t, s.AddArtifacts(t.Context(), []artifact.Artifact{someArtifact(1), someArtifact(2)}, from))
	must(t, s.AddArtifacts(t.Context(), []artifact.Artifact{someArtifact(3)}, from))
	addAll(t, s, someArtifact(4))
	must(t, s.RemoveArtifact(t.Context(), "acme", "art_1"))
	must(t, s.RemoveArtifact(t.Context(), "acme", "art_2"))
	want("acme", "art_1", nil)
	want("acme", "art_3", from)
	want("acme", "art_4", nil)
	want("umbrella", "art_3", nil)
	must(t, s.RemoveArtifact(t.Context(), "acme", "art_3"))
	must(t, s.AddArtifacts(t.Context(), []artifact.Artifact{someArtifact(5)}, from))
	want("acme", "art_5", from)
}

func artifactPages(t *testing.T, s artifact.Index) {
	for i := range 7 {
		a := someArtifact(i)
		a.Key = fmt.Sprint("chat", i%2)
		if i == 3 {
			a.Expires = time.Time{}
		}
		addAll(t, s, a)
	}
	other := someArtifact(99)
	other.Tenant = "umbrella"
	addAll(t, s, other)
	ids := func(q artifact.Query) (ids []string) {
		for {
			page, err := s.Artifacts(t.Context(), "acme", q)
			must(t, err)
			if len(page.Artifacts) > q.Limit {
				t.Fatal("a page is too long")
			}
			for _, a := range page.Artifacts {
				ids = append(ids, a.ID)
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return ids
			}
		}
	}
	all := []string{"art_6", "art_5", "art_4", "art_3", "art_2", "art_1", "art_0"}
	for _, limit := range []int{1, 3, 7, 100} {
		wantSame(t, ids(artifact.Query{Limit: limit}), all)
	}
	wantSame(t, ids(artifact.Query{Limit: 2, Key: "chat1"}), []string{"art_5", "art_3", "art_1"})
	wantSame(t, ids(artifact.Query{Limit: 2, Session: "s1", Run: "run4"}), []string{"art_4"})
	wantSame(t, ids(artifact.Query{Limit: 2, SHA256: "sum2"}), []string{"art_2"})
	wantSame(t, ids(artifact.Query{Limit: 2, At: epoch.Add(2 * time.Hour)}), []string{"art_3"})
	_, err := s.Artifacts(t.Context(), "acme", artifact.Query{Limit: 1, Cursor: "-1"})
	wantKind(t, err, fault.Invalid)
}

func artifactSums(t *testing.T, s artifact.Index) {
	want := func(tenant, session string, h artifact.Held) {
		t.Helper()
		got, err := s.ArtifactsHeld(t.Context(), tenant, session)
		must(t, err)
		wantSame(t, got, h)
	}
	want("acme", "s1", artifact.Held{})
	a, b, c := someArtifact(1), someArtifact(2), someArtifact(3)
	b.Session, b.Expires = "", time.Time{}
	c.Session = "s2"
	addAll(t, s, a, b, c)
	want("acme", "s1", artifact.Held{Tenant: 30, TenantFiles: 3, Session: 10, Files: 1})
	want("acme", "", artifact.Held{Tenant: 30, TenantFiles: 3})
	want("umbrella", "s1", artifact.Held{})
	must(t, s.RemoveArtifact(t.Context(), "acme", b.ID))
	want("acme", "s2", artifact.Held{Tenant: 20, TenantFiles: 2, Session: 10, Files: 1})
	_, err := s.RemoveExpired(t.Context(), epoch.Add(2*time.Hour), 10)
	must(t, err)
	want("acme", "s1", artifact.Held{})
}

func artifactsExpire(t *testing.T, s artifact.Index) {
	for i := range 5 {
		a := someArtifact(i)
		a.Expires = epoch.Add(time.Duration(i) * time.Minute)
		addAll(t, s, a)
	}
	expire := func(after time.Duration, limit int) []artifact.Ref {
		t.Helper()
		refs, err := s.RemoveExpired(t.Context(), epoch.Add(after), limit)
		must(t, err)
		slices.SortFunc(refs, func(a, b artifact.Ref) int { return strings.Compare(a.SHA256, b.SHA256) })
		return refs
	}
	if refs := expire(-time.Minute, 10); len(refs) != 0 {
		t.Error(refs)
	}
	wantSame(t, expire(3*time.Minute, 2), []artifact.Ref{{Tenant: "acme", SHA256: "sum0"}, {Tenant: "acme", SHA256: "sum1"}})
	wantSame(t, expire(3*time.Minute, 10), []artifact.Ref{{Tenant: "acme", SHA256: "sum2"}, {Tenant: "acme", SHA256: "sum3"}})
}

func blobsNamed(t *testing.T, s artifact.Index) {
	a, b := someArtifact(1), someArtifact(2)
	b.SHA256 = a.SHA256
	addAll(t, s, a, b)
	named := func(tenant string) bool {
		t.Helper()
		ok, err := s.BlobNamed(t.Context(), artifact.Ref{Tenant: tenant, SHA256: a.SHA256})
		must(t, err)
		return ok
	}
	if !named("acme") || named("umbrella") {
		t.Error("whose is it?")
	}
	must(t, s.RemoveArtifact(t.Context(), "acme", a.ID))
	if !named("acme") {
		t.Error("one is left that names it")
	}
	must(t, s.RemoveArtifact(t.Context(), "acme", b.ID))
	if named("acme") {
		t.Error("nobody is left that names it")
	}
}

func artifactsSettle(t *testing.T, s artifact.Index) {
	unsettled := func() (ids []string) {
		t.Helper()
		list, err := s.UnsettledArtifacts(t.Context())
		must(t, err)
		for _, a := range list {
			ids = append(ids, a.ID)
		}
		return ids
	}
	last, err := s.LastArtifact(t.Context())
	must(t, err)
	if last != 0 || unsettled() != nil {
		t.Error("an empty store has some")
	}
	addAll(t, s, someArtifact(1), someArtifact(2))
	last, err = s.LastArtifact(t.Context())
	must(t, err)
	addAll(t, s, someArtifact(3))
	wantSame(t, unsettled(), []string{"art_1", "art_2", "art_3"})
	must(t, s.SettleArtifacts(t.Context(), last))
	wantSame(t, unsettled(), []string{"art_3"})
	must(t, s.SettleArtifacts(t.Context(), 0)) // a late one takes nothing back
	wantSame(t, unsettled(), []string{"art_3"})
}

func linkKeys(t *testing.T, s artifact.Index) {
	want := func(keys ...artifact.LinkKey) {
		t.Helper()
		got, err := s.LinkKeys(t.Context())
		must(t, err)
		if diff := cmp.Diff(keys, got); diff != "" {
			t.Error(diff)
		}
	}
	one, two, three := artifact.LinkKey{ID: "1", Secret: "a", Created: epoch}, artifact.LinkKey{ID: "2", Secret: "b", Created: epoch}, artifact.LinkKey{ID: "3", Secret: "c", Created: epoch}
	until := func(k artifact.LinkKey, d time.Duration) artifact.LinkKey {
		k.Until = epoch.Add(d)
		return k
	}
	must(t, s.RotateLinkKey(t.Context(), one, time.Time{}, true))
	must(t, s.RotateLinkKey(t.Context(), two, epoch.Add(time.Hour), false))
	want(two, until(one, time.Hour))
	must(t, s.RotateLinkKey(t.Context(), three, epoch.Add(2*time.Hour), false))
	want(three, until(two, 2*time.Hour), until(one, time.Hour)) // a later rotation gives nobody more time
	must(t, s.DropLinkKeys(t.Context(), epoch.Add(time.Hour)))
	want(three, until(two, 2*time.Hour))
}

func firstLinkKey(t *testing.T, s artifact.Index) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			if err := s.RotateLinkKey(t.Context(), artifact.LinkKey{ID: fmt.Sprint(i), Secret: "x", Created: epoch}, time.Time{}, true); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	keys, err := s.LinkKeys(t.Context())
	must(t, err)
	if len(keys) != 1 {
		t.Errorf("%d keys", len(keys))
	}
}

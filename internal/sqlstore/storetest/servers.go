package storetest

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// long is longer than any of these tests takes.
const long = time.Hour

func join(t *testing.T, s Store, ids ...string) {
	t.Helper()
	for _, id := range ids {
		must(t, s.JoinServers(t.Context(), sandbox.Server{ID: id, URL: "https://" + id + ":1"}))
	}
}

// beat is a sign of life: which servers there are, and the ids of what was given to this one.
func beat(t *testing.T, s Store, id string, dead time.Duration) (all, taken []string) {
	t.Helper()
	servers, records, err := s.Beat(t.Context(), id, dead)
	must(t, err)
	for _, one := range servers {
		all = append(all, one.ID)
	}
	for _, r := range records {
		if r.Server != id {
			t.Errorf("%s says that it belongs to %q", r.ID, r.Server)
		}
		taken = append(taken, r.ID)
	}
	return all, taken
}

func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s: %s", what, diff)
	}
}

// of is a living sandbox of a server.
func of(server, id string) sandbox.Record {
	r := full(id)
	r.Server = server
	return r
}

func servers(t *testing.T, s Store) {
	join(t, s, "b", "a")
	all, _, err := s.Beat(t.Context(), "a", long)
	must(t, err)
	if diff := cmp.Diff([]sandbox.Server{{ID: "b", URL: "https://b:1"}, {ID: "a", URL: "https://a:1"}}, all); diff != "" {
		t.Fatal(diff)
	}
	must(t, s.LeaveServers(t.Context(), "b"))
	must(t, s.LeaveServers(t.Context(), "b"))
	left, _ := beat(t, s, "a", long)
	equal(t, "those that are left", left, []string{"a"})
}

func expelled(t *testing.T, s Store) {
	join(t, s, "a", "b")
	left := 0
	// b goes on saying that it lives: two seconds must lie between two of its beats until it is
	// missed.
	for end := time.Now().Add(2 * time.Minute); left != 1 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		all, _ := beat(t, s, "b", 2*time.Second)
		left = len(all)
	}
	if left != 1 {
		t.Fatalf("%d are left", left)
	}
	if _, _, err := s.Beat(t.Context(), "a", long); !errors.Is(err, sandbox.ErrExpelled) || !fault.Is(err, fault.Unavailable) {
		t.Fatalf("the one that was silent is told %v", err)
	}
}

func judge(t *testing.T, s Store) {
	join(t, s, "a", "b")
	all, _ := beat(t, s, "b", 0) // everybody has been silent for as long as that, b as well
	equal(t, "those that are left", all, []string{"a", "b"})
}

func inheritance(t *testing.T, s Store) {
	join(t, s, "a", "b", "c")
	for _, r := range []sandbox.Record{of("a", "sb1"), of("gone", "sb2"), of("", "sb3"), of("gone", "sb4"), of("c", "sb5")} {
		must(t, s.Insert(t.Context(), r))
	}
	must(t, s.Save(t.Context(), ended(of("gone", "sb4"), epoch)))
	_, taken := beat(t, s, "b", long)
	equal(t, "given to the second", taken, nil)
	var mu sync.Mutex
	var work sync.WaitGroup
	var given []string
	for _, id := range []string{"a", "c", "a", "b", "a"} {
		work.Go(func() {
			_, records, err := s.Beat(t.Context(), id, long)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			for _, r := range records {
				given = append(given, id+" "+r.ID)
			}
		})
	}
	work.Wait()
	slices.Sort(given)
	equal(t, "given to the first", given, []string{"a sb2", "a sb3"})
	must(t, s.LeaveServers(t.Context(), "a"))
	_, taken = beat(t, s, "b", long)
	equal(t, "given to the next", taken, []string{"sb1", "sb2", "sb3"})
	belongs, err := s.Belonging(t.Context())
	must(t, err)
	if diff := cmp.Diff(map[string]string{"sb1": "b", "sb2": "b", "sb3": "b", "sb5": "c"}, belongs); diff != "" {
		t.Fatal(diff)
	}
}

func fenced(t *testing.T, s Store) {
	must(t, s.Insert(t.Context(), of("a", "sb1")))
	for _, other := range []string{"b", ""} {
		if err := s.Save(t.Context(), ended(of(other, "sb1"), epoch)); !errors.Is(err, sandbox.ErrMoved) || !fault.Is(err, fault.Unavailable) {
			t.Fatalf("%q is told %v", other, err)
		}
	}
	owner, err := s.Owner(t.Context(), "sb1")
	if err != nil || owner != "a" {
		t.Fatalf("it belongs to %q, %v", owner, err)
	}
	must(t, s.Save(t.Context(), ended(of("a", "sb1"), epoch)))
	if err := s.Save(t.Context(), of("b", "sb1")); !fault.Is(err, fault.Conflict) {
		t.Fatalf("what has ended: %v", err)
	}
	for _, id := range []string{"sb1", "sb2"} {
		if _, err := s.Owner(t.Context(), id); !fault.Is(err, fault.NotFound) {
			t.Fatalf("owner of %s: %v", id, err)
		}
	}
}

func gather(t *testing.T, s Store) {
	for _, r := range []sandbox.Record{of("a", "sb1"), of("", "sb2"), of("b", "sb3")} {
		must(t, s.Insert(t.Context(), r))
	}
	must(t, s.Save(t.Context(), ended(of("b", "sb3"), epoch)))
	all, err := s.Gather(t.Context(), "")
	must(t, err)
	var found []string
	for _, r := range all {
		found = append(found, r.ID+" of "+r.Server)
	}
	equal(t, "gathered", found, []string{"sb1 of ", "sb2 of "})
	must(t, s.Save(t.Context(), of("", "sb1")))
}

func holder(t *testing.T, s Store) {
	must(t, s.Insert(t.Context(), of("a", "sb1")))
	plain := bare("sb2")
	must(t, s.Insert(t.Context(), plain))
	for name, ask := range map[string][3]string{"by key": {"acme", "key-sb1", ""}, "by idempotency key": {"acme", "", "idem-sb1"}, "by both": {"acme", "other", "idem-sb1"}} {
		if r, err := s.Holder(t.Context(), ask[0], ask[1], ask[2]); err != nil || r.ID != "sb1" {
			t.Errorf("%s: %q, %v", name, r.ID, err)
		}
	}
	for name, ask := range map[string][3]string{"of another tenant": {"globex", "key-sb1", "idem-sb1"}, "without any": {"acme", "", ""}} {
		if _, err := s.Holder(t.Context(), ask[0], ask[1], ask[2]); !fault.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, s.Save(t.Context(), ended(of("a", "sb1"), epoch)))
	if _, err := s.Holder(t.Context(), "acme", "key-sb1", ""); !fault.Is(err, fault.NotFound) {
		t.Errorf("of one that has ended: %v", err)
	}
}

func quota(t *testing.T, s Store) {
	const most = 5
	var work sync.WaitGroup
	errs := make([]error, 12)
	for i := range errs {
		work.Go(func() {
			r := bare("sb" + string(rune('a'+i)))
			r.MostOfTenant = most
			errs[i] = s.Insert(t.Context(), r, event(r, sandbox.LifecycleCreated))
		})
	}
	work.Wait()
	made := 0
	for _, err := range errs {
		switch {
		case err == nil:
			made++
		case !fault.Is(err, fault.Exhausted):
			t.Error(err)
		}
	}
	living, err := s.Living(t.Context())
	must(t, err)
	if made != most || len(living) != most {
		t.Fatalf("%d were made and %d live, of at most %d", made, len(living), most)
	}
	other := bare("other")
	other.Tenant, other.MostOfTenant = "globex", 1
	must(t, s.Insert(t.Context(), other))
}

func secret(t *testing.T, s Store) {
	for _, fresh := range []string{"first", "second"} {
		value, err := s.Secret(t.Context(), "name", []byte(fresh))
		must(t, err)
		if string(value) != "first" {
			t.Fatalf("it is %q", value)
		}
	}
	if value, err := s.Secret(t.Context(), "other", []byte("other's")); err != nil || string(value) != "other's" {
		t.Fatalf("another one is %q, %v", value, err)
	}
	for _, old := range []string{"other's", "what it was before"} { // the second comes too late
		if value, err := s.SwapSecret(t.Context(), "other", []byte(old), []byte("after "+old)); err != nil || string(value) != "after other's" {
			t.Fatalf("replaced, it is %q, %v", value, err)
		}
	}
}

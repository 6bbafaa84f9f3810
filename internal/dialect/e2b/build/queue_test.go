package build

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// newJobs gives a queue that only remembers what has begun, and jobs of templates of their own.
func newJobs(parallel int) (q *queue, begun *[]string, of func(tenant string) *job) {
	begun = &[]string{}
	q = newQueue(parallel, func(j *job) { *begun = append(*begun, j.who.Tenant) })
	n := 0
	return q, begun, func(tenant string) *job {
		n++
		return &job{who: auth.Principal{Tenant: tenant}, template: fmt.Sprint(n)}
	}
}

func TestOneTenantLeavesAPlaceToTheOthers(t *testing.T) {
	for _, c := range []struct {
		parallel int
		tenants  string // one letter each, in the order in which they ask
		want     string // who has begun
	}{
		{1, "ab", "a"},
		{2, "aaab", "ab"},
		{2, "aabc", "ab"},
		{3, "aaaab", "aab"},
		{3, "aaaa", "aa"},
	} {
		q, begun, of := newJobs(c.parallel)
		for _, tenant := range c.tenants {
			if err := q.add(of(string(tenant))); err != nil {
				t.Fatal(err)
			}
		}
		if got := strings.Join(*begun, ""); got != c.want {
			t.Errorf("%d places, asked for by %s: %s has begun, want %s", c.parallel, c.tenants, got, c.want)
		}
	}
}

func TestOneBuildOfATemplateGoesOn(t *testing.T) {
	q, begun, of := newJobs(3)
	first, second := of("a"), of("a")
	second.template = first.template
	for _, j := range []*job{first, second} {
		if err := q.add(j); err != nil {
			t.Fatal(err)
		}
	}
	if len(*begun) != 1 {
		t.Errorf("%d have begun", len(*begun))
	}
	q.done(first)
	if len(*begun) != 2 {
		t.Errorf("after the first %d have begun", len(*begun))
	}
}

func TestAPlaceThatIsFreeAgainIsTaken(t *testing.T) {
	q, begun, of := newJobs(2)
	first := of("a")
	for _, j := range []*job{first, of("a"), of("b"), of("b")} {
		if err := q.add(j); err != nil {
			t.Fatal(err)
		}
	}
	q.done(first)
	if want := []string{"a", "b", "a"}; !slices.Equal(*begun, want) {
		t.Errorf("%v have begun, want %v", *begun, want)
	}
}

func TestOneTenantDoesNotFillTheQueue(t *testing.T) {
	q, _, of := newJobs(2)
	for range 1 + maxQueuedTenant { // the first goes on
		if err := q.add(of("a")); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.add(of("a")); !fault.Is(err, fault.Exhausted) {
		t.Errorf("one too many of a tenant: %v", err)
	}
	if err := q.add(of("b")); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
}

func TestTheQueueIsBounded(t *testing.T) {
	q, _, of := newJobs(1)
	for i := range 1 + maxQueued {
		if err := q.add(of(fmt.Sprint("tenant", i))); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := q.add(of("another")); !fault.Is(err, fault.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
}

func TestTheStepsThatWaitAreBounded(t *testing.T) {
	large := func(j *job, size int) *job {
		j.want.Steps = []step{{Type: stepRun, Args: []string{strings.Repeat("x", size)}}}
		return j
	}
	q, _, of := newJobs(1)
	if err := q.add(of("going")); err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		tenant := fmt.Sprint("tenant", i/2) // two of each are all that it may have, and those of four all that there may be
		if err := q.add(large(of(tenant), maxQueuedTenantBytes/2-1000)); err != nil {
			t.Fatal(i, err)
		}
		if i == 1 {
			if err := q.add(large(of(tenant), 2000)); !fault.Is(err, fault.Exhausted) {
				t.Errorf("too much of a tenant: %v", err)
			}
		}
	}
	if err := q.add(large(of("another"), 8000)); !fault.Is(err, fault.Exhausted) {
		t.Errorf("too much of all: %v", err)
	}
	q.drop("2", nil) // the first that waits
	if err := q.add(large(of("another"), 8000)); err != nil {
		t.Errorf("after one has left: %v", err)
	}
}

package storetest

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/fault"
)

// RunDatasets checks a store against what datasets ask of it. Each call of open gives an empty one and sees to its end.
func RunDatasets(t *testing.T, open func(t *testing.T) dataset.Index) {
	for name, claim := range map[string]func(*testing.T, dataset.Index){
		"a dataset comes back as it was put, and a put replaces it":             datasetRoundTrip,
		"datasets are apart by session and tenant, by id":                       datasetsApart,
		"a file name is one dataset's of a session":                             datasetFiles,
		"what is being staged fails, one or all, and nothing else does":         datasetsFail,
		"a path changes only with the content that it was found for":            datasetPath,
		"content counts once for a tenant, however many sessions have it":       datasetsHeld,
		"a dataset is deleted for its own tenant, and with its session for all": datasetsDelete,
	} {
		t.Run(name, func(t *testing.T) { claim(t, open(t)) })
	}
}

func someDataset(session, id string) dataset.Dataset {
	return dataset.Dataset{
		Tenant: "acme", Session: session, ID: id, File: id + ".csv", Status: dataset.Loaded, Path: "/session/data/" + id + ".csv", Size: 7,
		SHA256: "sum of " + id, Error: "none", Updated: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC),
	}
}

func put(t *testing.T, s dataset.Index, all ...dataset.Dataset) {
	t.Helper()
	for _, d := range all {
		if err := s.PutDataset(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
}

func wantDatasets(t *testing.T, s dataset.Index, tenant, session string, want ...dataset.Dataset) {
	t.Helper()
	got, err := s.Datasets(t.Context(), tenant, session)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("datasets of %q in %s: %s %v", tenant, session, diff, err)
	}
}

func datasetRoundTrip(t *testing.T, s dataset.Index) {
	d := someDataset("one", "a")
	put(t, s, d)
	d.Status, d.Path, d.SHA256, d.Size, d.File, d.Error, d.Updated = dataset.Pending, "", "", 0, "b.csv", "", d.Updated.Add(time.Hour)
	put(t, s, d)
	got, err := s.Dataset(t.Context(), "acme", "one", "a")
	if diff := cmp.Diff(d, got); diff != "" || err != nil {
		t.Errorf("%s %v", diff, err)
	}
	_, err = s.Dataset(t.Context(), "umbrella", "one", "a")
	if !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	stolen := d
	stolen.Tenant, stolen.Status = "umbrella", dataset.Failed
	put(t, s, stolen)
	wantDatasets(t, s, "acme", "one", d)
}

func datasetsApart(t *testing.T, s dataset.Index) {
	b, a, other := someDataset("one", "b"), someDataset("one", "a"), someDataset("two", "a")
	put(t, s, b, a, other)
	wantDatasets(t, s, "acme", "one", a, b)
	wantDatasets(t, s, "", "one", a, b)
	wantDatasets(t, s, "acme", "two", other)
	wantDatasets(t, s, "umbrella", "one")
}

func datasetFiles(t *testing.T, s dataset.Index) {
	a, b := someDataset("one", "a"), someDataset("one", "b")
	b.File = a.File
	put(t, s, a)
	if err := s.PutDataset(t.Context(), b); !fault.Is(err, fault.Conflict) {
		t.Errorf("%v", err)
	}
	b.Session = "two"
	put(t, s, b)
}

func datasetsFail(t *testing.T, s dataset.Index) {
	now := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	staging := func(session, id string) dataset.Dataset {
		d := someDataset(session, id)
		d.Status = dataset.Staging
		return d
	}
	a, b, other, loaded := staging("one", "a"), staging("one", "b"), staging("two", "a"), someDataset("one", "c")
	put(t, s, a, b, other, loaded)
	failed := func(d *dataset.Dataset) { d.Status, d.Error, d.Updated = dataset.Failed, "why", now }
	if err := s.FailDatasets(t.Context(), "one", "a", "why", now); err != nil {
		t.Fatal(err)
	}
	failed(&a)
	wantDatasets(t, s, "acme", "one", a, b, loaded)
	wantDatasets(t, s, "acme", "two", other)
	if err := s.FailDatasets(t.Context(), "", "", "why", now); err != nil {
		t.Fatal(err)
	}
	failed(&b)
	failed(&other)
	wantDatasets(t, s, "acme", "one", a, b, loaded)
	wantDatasets(t, s, "acme", "two", other)
}

func datasetPath(t *testing.T, s dataset.Index) {
	a := someDataset("one", "a")
	put(t, s, a)
	stale := a
	stale.Path, stale.SHA256 = "/elsewhere", "of older content"
	fresh := a
	fresh.Path, fresh.Status = "/datasets/a.csv", dataset.Failed // only the path is taken
	for _, d := range []dataset.Dataset{fresh, stale} {
		if err := s.PlaceDataset(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	a.Path = "/datasets/a.csv"
	wantDatasets(t, s, "acme", "one", a)
}

func datasetsHeld(t *testing.T, s dataset.Index) {
	a, same, more, theirs, pending := someDataset("one", "a"), someDataset("two", "a"), someDataset("two", "b"), someDataset("three", "c"), someDataset("two", "d")
	theirs.Tenant, pending.SHA256 = "umbrella", ""
	put(t, s, a, same, more, theirs, pending)
	for tenant, want := range map[string]int{"acme": 2, "umbrella": 1, "nobody": 0} {
		bytes, files, err := s.DatasetsHeld(t.Context(), tenant)
		if bytes != int64(want)*7 || files != want || err != nil {
			t.Errorf("%s has %d bytes in %d files, not in %d: %v", tenant, bytes, files, want, err)
		}
	}
}

func datasetsDelete(t *testing.T, s dataset.Index) {
	a, b, other := someDataset("one", "a"), someDataset("one", "b"), someDataset("two", "a")
	put(t, s, a, b, other)
	if err := s.DeleteDataset(t.Context(), "umbrella", "one", "a"); err != nil {
		t.Fatal(err)
	}
	wantDatasets(t, s, "acme", "one", a, b)
	if err := s.DeleteDataset(t.Context(), "acme", "one", "a"); err != nil {
		t.Fatal(err)
	}
	wantDatasets(t, s, "acme", "one", b)
	if err := s.ForgetDatasets(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	wantDatasets(t, s, "acme", "one")
	wantDatasets(t, s, "acme", "two", other)
}

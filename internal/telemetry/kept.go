package telemetry

import (
	"context"
	"slices"
	"time"
)

// kept counts what outlives a sandbox: artifacts, datasets, and links to them.
type kept struct {
	artifacts, artifactBytes, artifactsRejected *counter
	datasets, datasetBytes, datasetsRejected    *counter
	linksRefused                                *counter
}

// How content was stored.
const (
	storedNew    = "new"
	storedShared = "shared" // the tenant has the same content already
)

// The reasons that are labels; another one is counted as reasonOther.
var (
	artifactReasons = []string{"too_large", "session_quota", "tenant_quota", "too_many", "changed", "unreadable", "internal", reasonOther}
	datasetReasons  = []string{"too_large", "tenant_quota", "invalid", "internal", reasonOther}
	linkReasons     = []string{"missing", "malformed", "signature", "expired", "unknown", reasonOther}
)

const reasonOther = "other"

// reason keeps what others think up from becoming a label.
func reason(known []string, given string) string {
	if slices.Contains(known, given) {
		return given
	}
	return reasonOther
}

func newKept() kept {
	k := kept{
		artifacts:         newCounter("cove_artifacts_total", "Artifacts that were kept; shared when the same content was there already.", "stored"),
		artifactBytes:     newCounter("cove_artifact_bytes_total", "Bytes of artifacts that were kept.", "stored"),
		artifactsRejected: newCounter("cove_artifacts_rejected_total", "Files that were not kept as artifacts, by reason.", "reason"),
		datasets:          newCounter("cove_datasets_total", "Datasets that were staged; shared when the same content was there already.", "stored"),
		datasetBytes:      newCounter("cove_dataset_bytes_total", "Bytes of datasets that were staged.", "stored"),
		datasetsRejected:  newCounter("cove_datasets_rejected_total", "Datasets that were not staged, by reason.", "reason"),
		linksRefused:      newCounter("cove_links_refused_total", "Requests for an artifact whose link was refused, by reason.", "reason"),
	}
	for _, c := range []*counter{k.artifacts, k.artifactBytes, k.datasets, k.datasetBytes} {
		c.add(0, storedNew)
		c.add(0, storedShared)
	}
	for c, reasons := range map[*counter][]string{k.artifactsRejected: artifactReasons, k.datasetsRejected: datasetReasons, k.linksRefused: linkReasons} {
		for _, r := range reasons {
			c.add(0, r)
		}
	}
	return k
}

func (k *kept) families() []family {
	return []family{k.artifacts, k.artifactBytes, k.artifactsRejected, k.datasets, k.datasetBytes, k.datasetsRejected, k.linksRefused}
}

func stored(files, bytes *counter, n int64, deduplicated bool) {
	label := storedNew
	if deduplicated {
		label = storedShared
	}
	files.inc(label)
	bytes.add(uint64(max(0, n)), label)
}

// ArtifactKept counts a file that was kept; deduplicated tells that its content was there already.
func (o *Observer) ArtifactKept(bytes int64, deduplicated bool) {
	stored(o.kept.artifacts, o.kept.artifactBytes, bytes, deduplicated)
}

// ArtifactRejected counts a file that was not kept.
func (o *Observer) ArtifactRejected(why string) {
	o.kept.artifactsRejected.inc(reason(artifactReasons, why))
}

// DatasetStaged counts a dataset that a client sent; deduplicated tells that its content was there already.
func (o *Observer) DatasetStaged(bytes int64, deduplicated bool) {
	stored(o.kept.datasets, o.kept.datasetBytes, bytes, deduplicated)
}

// DatasetRejected counts a dataset that was not taken.
func (o *Observer) DatasetRejected(why string) {
	o.kept.datasetsRejected.inc(reason(datasetReasons, why))
}

// LinkRefused counts a request whose link to an artifact is not good.
func (o *Observer) LinkRefused(why string) { o.kept.linksRefused.inc(reason(linkReasons, why)) }

// censusPatience is how long a scrape waits for the database.
const censusPatience = 4 * time.Second

// WatchSessions adds how many sessions there are in each state; it is called at most once, before Metrics is served.
func (o *Observer) WatchSessions(census func(context.Context) (map[string]int, error)) {
	o.add(newGauges(func(r *reading) {
		// A scrape has no caller whose leaving should stop it: the time is bounded.
		ctx, cancel := context.WithTimeout(context.Background(), censusPatience)
		defer cancel()
		now, err := census(ctx)
		if err != nil {
			return // a gap in the graph: what nobody could tell is not zero
		}
		for state, n := range now {
			r.set("cove_sessions", float64(n), state)
		}
	}, desc{name: "cove_sessions", help: "Sessions that are known, by state.", labels: []string{"state"}}))
}

package template

// census counts what a layer holds. It is compared at each start: that reads no content, so it takes milliseconds. A
// change that keeps names and sizes is found by Verify alone.
type census struct {
	Entries int    `json:"entries"`
	Bytes   int64  `json:"bytes"` // of regular files
	Names   string `json:"names"` // digest of names, types and sizes
}

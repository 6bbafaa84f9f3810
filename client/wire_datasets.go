package client

import "time"

// Dataset is data staged into a session.
type Dataset struct {
	// ID is the caller's own name for it.
	ID string `json:"id"`
	// Status is pending, loaded or failed.
	Status string `json:"status" enum:"pending,loaded,failed"`
	// Path is where code finds it once it is loaded.
	Path      string    `json:"path,omitempty"`
	Size      int64     `json:"size,omitempty"`
	SHA256    string    `json:"sha256,omitempty"`
	UpdatedAt time.Time `json:"updated_at"`
	// Error says why it failed.
	Error string `json:"error,omitempty"`
}

// DatasetList is what a session has.
type DatasetList struct {
	Datasets []Dataset `json:"datasets"`
}

// DatasetRequest changes what is known of a session's dataset without sending it.
type DatasetRequest struct {
	// Status pending says that it is being fetched, failed that it could not be; loaded needs SHA256.
	Status string `json:"status" enum:"pending,loaded,failed"`
	// SHA256 of content that an earlier upload of yours brought: then nothing has to be sent again. Content that is not here is 404.
	SHA256 string `json:"sha256,omitempty"`
	// File is its name in /session/data; absent is the id, with .parquet where the id has no extension.
	File  string `json:"file,omitempty"`
	Error string `json:"error,omitempty"`
}

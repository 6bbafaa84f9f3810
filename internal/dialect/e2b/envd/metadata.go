package envd

import (
	"net/http"
	"strings"

	"github.com/covehq/cove/internal/fault"
)

const (
	metadataHeader   = "X-Metadata-"
	maxMetadataKey   = 246  // a name of an attribute has at most 255 bytes, and ours begin with metadataPrefix
	maxMetadataTotal = 4096 // what ext4 keeps of attributes
)

// metadata reads what the headers of an upload say of its files, as attributes.
func metadata(header http.Header) (map[string]string, error) {
	var found map[string]string
	total := 0
	for name, values := range header {
		if len(name) < len(metadataHeader) || !strings.EqualFold(name[:len(metadataHeader)], metadataHeader) {
			continue
		}
		key, value := strings.ToLower(name[len(metadataHeader):]), values[0]
		switch {
		case key == "" || !printable(key):
			return nil, fault.New(fault.Invalid, "metadata key %.64q: use printable ASCII, at least one character", key)
		case len(key) > maxMetadataKey:
			return nil, fault.New(fault.Invalid, "metadata key %.64q… has %d bytes; at most %d are allowed", key, len(key), maxMetadataKey)
		case !printable(value):
			return nil, fault.New(fault.Invalid, "metadata value of %.64q: use printable ASCII", key)
		}
		if total += len(metadataPrefix) + len(key) + len(value); total > maxMetadataTotal {
			return nil, fault.New(fault.Invalid, "the metadata of a file has at most %d bytes", maxMetadataTotal)
		}
		if found == nil {
			found = map[string]string{}
		}
		found[metadataPrefix+key] = value
	}
	return found, nil
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' })
}

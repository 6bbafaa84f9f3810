package build

import (
	"io"
	"net/http"
)

// What tests from outside need to see.

// ParseRef gives the parts of a template's name.
func ParseRef(text string) (namespace, name, tag string, err error) {
	r, err := parseRef(text)
	return r.namespace, r.name, r.tag, err
}

// Packed is an entry of an archive.
type Packed struct {
	Path string
	Kind byte
	Mode uint32
	Link string
}

// WalkArchive reads an archive.
func WalkArchive(r io.Reader, each func(Packed, io.Reader) error) error {
	return walkArchive(r, func(p packed, r io.Reader) error { return each(Packed{p.path, p.kind, p.mode, p.link}, r) })
}

// Destinations tells where the entries of an archive go that a COPY step unpacks; an empty one goes nowhere.
func Destinations(src, dest string, destDir bool, entries []Packed) []string {
	var all []packed
	for _, e := range entries {
		all = append(all, packed{e.Path, e.Kind, e.Mode, e.Link})
	}
	c := &copying{from: sourceOf(src, all), dest: dest, destDir: destDir}
	var out []string
	for _, e := range all {
		to, _ := c.target(e)
		out = append(out, to)
	}
	return out
}

// DecodeBuild reads a request for a build.
func DecodeBuild(w http.ResponseWriter, r *http.Request) error {
	var q buildRequest
	if err := (&call{w: w, r: r}).decode(&q); err != nil {
		return err
	}
	_, _, _, err := q.plan()
	return err
}

// DecodeStart reads the steps of a build.
func DecodeStart(w http.ResponseWriter, r *http.Request) error {
	var q startRequest
	if err := (&call{w: w, r: r}).decode(&q); err != nil {
		return err
	}
	return q.validate()
}

// Expand puts variables into a text.
func Expand(text string, known map[string]string, most int) (string, bool) {
	return expand(text, known, most)
}

// KeptBooks is of how many builds the whole log stays in memory.
const KeptBooks = keptBooks

// MaxPath bounds a path of an archive.
const MaxPath = maxPath

// MaxKept is how many archives of a tenant are kept.
const MaxKept = maxKept

// MaxUploads is how many uploads of a tenant go on at once.
const MaxUploads = maxUploads

package agentsandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// maxBody bounds an object as it is posted. What a server adds to one fits into a document beside it.
const maxBody = 512 << 10

// maxAnnotationBytes bounds the annotations of one object, as Kubernetes does.
const maxAnnotationBytes = 256 << 10

// maxDepth bounds how deep an object is nested. Kubernetes' own have about twenty levels, and encoding/json reads 10,000, of
// which what the server puts around an object takes some.
const maxDepth = 100

// The content types of bodies.
const (
	typeJSON       = "application/json"
	typeMergePatch = "application/merge-patch+json"
	typeJSONPatch  = "application/json-patch+json"
)

// content reads a body of one of the types, and says which it is.
func (c *call) content(types ...string) (body []byte, media string, err error) {
	media = typeJSON
	if given := c.r.Header.Get("Content-Type"); given != "" {
		media, _, err = mime.ParseMediaType(given)
	}
	known := false
	for _, t := range types {
		known = known || t == media
	}
	if err != nil || !known {
		return nil, "", refuse(http.StatusUnsupportedMediaType, reasonMedia, "the body of the request was in an unknown format - accepted media types include: %s", strings.Join(types, ", "))
	}
	body, err = transfer.ReadJSON(c.ctx(), c.who.Tenant, http.MaxBytesReader(c.w, c.r.Body, maxBody))
	var large *http.MaxBytesError
	switch {
	case transfer.OverBudget(err):
		return nil, "", err
	case fault.Is(err, fault.Invalid):
		return nil, "", badRequest("%s", fault.Message(err))
	case errors.As(err, &large):
		return nil, "", tooLarge()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, "", refuse(http.StatusRequestTimeout, reasonTimeout, "the body of the request did not come in time")
	case err != nil:
		return nil, "", badRequest("the body of the request could not be read")
	}
	transfer.SetReadDeadline(c.w, time.Time{})
	return body, media, nil
}

func tooLarge() error {
	return refuse(http.StatusRequestEntityTooLarge, reasonTooLarge, "Request entity too large: limit is %d", maxBody)
}

// decodeFields reads one JSON object; numbers stay as they are written.
func decodeFields(body []byte) (fields, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, badRequest("the body of the request is not valid JSON: %s", syntaxOf(err))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, badRequest("the body of the request has more than one JSON value")
	}
	f, ok := v.(fields)
	if !ok {
		return nil, badRequest("the body of the request is not a JSON object")
	}
	return f, checkDepth(f)
}

func checkDepth(f fields) error {
	if !fits(f, maxDepth) {
		return badRequest("the object is nested too deep: there may be %d levels", maxDepth)
	}
	return nil
}

// fits tells whether a value has at most so many levels of objects and lists.
func fits(v any, most int) bool {
	switch t := v.(type) {
	case fields:
		for _, v := range t {
			if most == 0 || !fits(v, most-1) {
				return false
			}
		}
	case []any:
		for _, v := range t {
			if most == 0 || !fits(v, most-1) {
				return false
			}
		}
	default:
		return true
	}
	return most > 0
}

// decodeInto reads a JSON object into a value of ours.
func decodeInto(body []byte, value any) error {
	if err := json.Unmarshal(body, value); err != nil {
		return badRequest("the body of the request cannot be understood")
	}
	return nil
}

func syntaxOf(err error) string {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return syntax.Error()
	}
	return "it ends too early"
}

// decodeObject reads an object of a kind as a client posts it; namespace and name are those of the path, and empty where the
// path has none. What is wrong with its words is told here, what is wrong with its spec by check.
func decodeObject(body []byte, k *kind, version, namespace, name string) (*object, error) {
	f, err := decodeFields(body)
	if err != nil {
		return nil, err
	}
	return objectOf(f, k, version, namespace, name)
}

func objectOf(f fields, k *kind, version, namespace, name string) (*object, error) {
	switch apiVersion, ok := f["apiVersion"].(string); {
	case !ok || apiVersion == "":
		return nil, badRequest("Object 'apiVersion' is missing; want %s", k.apiVersion(version))
	case apiVersion != k.apiVersion(version):
		return nil, badRequest("the API version in the data (%.80s) does not match the expected API version (%s)", apiVersion, k.apiVersion(version))
	}
	switch name, ok := f["kind"].(string); {
	case !ok || name == "":
		return nil, badRequest("Object 'Kind' is missing; want %s", k.name)
	case name != k.name:
		return nil, badRequest("the kind in the data (%.80s) does not match the expected kind (%s)", name, k.name)
	}
	if err := checkTypes(f); err != nil {
		return nil, err
	}
	o := &object{kind: k, version: version, body: without(f, "apiVersion", "kind", "status")}
	if o.meta() == nil {
		o.body = with(o.body, "metadata", any(fields{}))
	}
	for _, ours := range []string{"managedFields", "selfLink"} {
		o.setMeta(ours, nil)
	}
	if err := o.place(namespace, name); err != nil {
		return nil, err
	}
	return o, checkMetadata(o)
}

// checkTypes refuses an object whose metadata or spec we could not read.
func checkTypes(f fields) error {
	for _, name := range []string{"metadata", "spec", "status"} {
		if _, ok := f[name].(fields); !ok && f[name] != nil {
			return badRequest("json: cannot unmarshal into field %q: it is not an object", name)
		}
	}
	meta := inner(f, "metadata")
	for _, name := range []string{"name", "generateName", "namespace", "uid", "resourceVersion", "creationTimestamp"} {
		if _, ok := meta[name].(string); !ok && meta[name] != nil {
			return badRequest("json: cannot unmarshal into field \"metadata.%s\": it is not a string", name)
		}
	}
	for _, name := range []string{"labels", "annotations"} {
		pairs, ok := meta[name].(fields)
		if !ok && meta[name] != nil {
			return badRequest("json: cannot unmarshal into field \"metadata.%s\": it is not an object", name)
		}
		for key, value := range pairs {
			if _, ok := value.(string); !ok {
				return badRequest("json: cannot unmarshal into field \"metadata.%s\": the value of %.80q is not a string", name, key)
			}
		}
	}
	for _, name := range []string{"ownerReferences", "finalizers"} {
		if _, ok := meta[name].([]any); !ok && meta[name] != nil {
			return badRequest("json: cannot unmarshal into field \"metadata.%s\": it is not a list", name)
		}
	}
	return nil
}

// place gives an object the namespace and the name of its path.
func (o *object) place(namespace, name string) error {
	if given := o.namespace(); given != "" && given != namespace {
		return badRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	o.setMeta("namespace", namespace)
	if given := o.name(); name != "" && given != "" && given != name {
		return badRequest("the name of the object (%.253s) does not match the name on the URL (%.253s)", given, name)
	}
	if name != "" {
		o.setMeta("name", name)
	}
	if o.name() == "" {
		prefix := text(o.body, "metadata", "generateName")
		if prefix == "" {
			return invalid(o.kind, "", "metadata.name", "Required value: name or generateName is required")
		}
		o.setMeta("name", prefix[:min(len(prefix), 58)]+suffix())
	}
	return nil
}

var (
	labelForm     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	subdomainForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	qualifiedForm = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
)

const (
	maxLabel     = 63
	maxSubdomain = 253
)

func isLabel(s string) bool     { return len(s) <= maxLabel && labelForm.MatchString(s) }
func isSubdomain(s string) bool { return len(s) <= maxSubdomain && subdomainForm.MatchString(s) }

// isQualified tells whether a text may be the key of a label or an annotation.
func isQualified(key string) bool {
	prefix, name, ok := strings.Cut(key, "/")
	if !ok {
		prefix, name = "", key
	}
	return (!ok || isSubdomain(prefix)) && len(name) <= maxLabel && qualifiedForm.MatchString(name)
}

func isLabelValue(value string) bool {
	return value == "" || len(value) <= maxLabel && qualifiedForm.MatchString(value)
}

func checkMetadata(o *object) error {
	k, name := o.kind, o.name()
	if k.label && !isLabel(name) {
		return invalid(k, name, "metadata.name", "Invalid value: %.80q: must be no more than %d characters of a-z, 0-9 and '-', and begin and end with a letter or digit", name, maxLabel)
	}
	if !isSubdomain(name) {
		return invalid(k, name, "metadata.name", "Invalid value: %.80q: must be no more than %d characters of a-z, 0-9, '-' and '.', and begin and end with a letter or digit", name, maxSubdomain)
	}
	for key, value := range texts(o.body, "metadata", "labels") {
		if field, why := wrongLabel(key, value); why != "" {
			return invalid(k, name, "metadata.labels", "Invalid value: %.80q: %s", field, why)
		}
	}
	size := 0
	for key, value := range texts(o.body, "metadata", "annotations") {
		if size += len(key) + len(value); !isQualified(strings.ToLower(key)) {
			return invalid(k, name, "metadata.annotations", "Invalid value: %.80q: an annotation is named by up to %d letters, digits, '-', '_' and '.', with a domain and a slash before or without", key, maxLabel)
		}
	}
	if size > maxAnnotationBytes {
		return invalid(k, name, "metadata.annotations", "Too long: may not be more than %d bytes", maxAnnotationBytes)
	}
	return nil
}

// wrongLabel tells which part of a label is wrong and why; empty: none is.
func wrongLabel(key, value string) (part, why string) {
	if !isQualified(key) {
		return key, "a label is named by up to 63 letters, digits, '-', '_' and '.', with a domain and a slash before or without"
	}
	if !isLabelValue(value) {
		return value, "a value has up to 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
	}
	return "", ""
}

package agentsandbox

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/policy"
)

// object is one object of a kind. It is never changed once it is in the store: whoever changes it puts another in its place.
type object struct {
	kind    *kind
	version string // in whose words its spec is
	body    fields // metadata, spec, status and whatever else came; the status is always in the words of beta

	rv   uint64
	size int // of its document

	// Of a Sandbox alone, and shown to nobody: what the domain knows it by, and whether we paused it ourselves.
	id   string
	held bool
	born bool // it has been ready once
	// network is what may leave its sandbox; nil: what the server says.
	network *policy.Network
}

// envelope is an object as it is kept.
type envelope struct {
	Version string          `json:"version"`
	ID      string          `json:"id,omitempty"`
	Held    bool            `json:"held,omitempty"`
	Born    bool            `json:"born,omitempty"`
	Network *policy.Network `json:"network,omitempty"`
	Body    json.RawMessage `json:"body"`
}

func (o *object) meta() fields        { return inner(o.body, "metadata") }
func (o *object) spec() fields        { return inner(o.body, "spec") }
func (o *object) status() fields      { return inner(o.body, "status") }
func (o *object) name() string        { return text(o.body, "metadata", "name") }
func (o *object) namespace() string   { return text(o.body, "metadata", "namespace") }
func (o *object) uid() string         { return text(o.body, "metadata", "uid") }
func (o *object) generation() int64   { return number(at(o.body, "metadata", "generation")) }
func (o *object) created() time.Time  { return parseTime(text(o.body, "metadata", "creationTimestamp")) }
func (o *object) path() string        { return o.namespace() + "/" + o.name() }
func (o *object) labels() fields      { return inner(o.body, "metadata", "labels") }
func (o *object) annotations() fields { return inner(o.body, "metadata", "annotations") }
func (o *object) document() envelope {
	return envelope{o.version, o.id, o.held, o.born, o.network, json.RawMessage(encode(o.body))}
}
func (o *object) ownedBy(u string) bool { return text(controller(o), "uid") == u }

// change is a copy to change: its own metadata, and everything else shared.
func (o *object) change() *object {
	c := *o
	c.body = with(o.body, "metadata", any(with(o.meta(), "", nil)))
	return &c
}

// set puts one field of a copy.
func (o *object) set(name string, value any) { o.body = with(o.body, name, value) }

func (o *object) setMeta(name string, value any) {
	o.body = with(o.body, "metadata", any(with(o.meta(), name, value)))
}

// replicas is how many a pool or a Sandbox should have.
func (o *object) replicas() int64 {
	if o.kind == sandboxKind && o.version == beta {
		if text(o.spec(), "operatingMode") == modeSuspended {
			return 0
		}
		return 1
	}
	if v, ok := o.spec()["replicas"]; ok {
		return number(v)
	}
	return 1
}

// controller is the reference to the object that owns another and decides about it; nil: nobody does.
func controller(o *object) fields {
	for _, v := range list(o.body, "metadata", "ownerReferences") {
		if f, ok := v.(fields); ok && f["controller"] == true {
			return f
		}
	}
	return nil
}

// ownerReference says that an object belongs to another and ends with it.
func ownerReference(o *object) fields {
	return fields{
		"apiVersion": o.kind.apiVersion(beta), "kind": o.kind.name, "name": o.name(), "uid": o.uid(),
		"controller": true, "blockOwnerDeletion": true,
	}
}

// condition finds one of an object's conditions by its type; nil: there is none.
func (o *object) condition(name string) fields {
	for _, v := range list(o.status(), "conditions") {
		if f, ok := v.(fields); ok && f["type"] == name {
			return f
		}
	}
	return nil
}

func (o *object) ready() bool { return text(o.condition("Ready"), "status") == "True" }

// newUID is a random one, as Kubernetes writes them.
func newUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// suffix is what follows a generateName.
func suffix() string {
	const letters = "bcdfghjklmnpqrstvwxz2456789"
	var b [5]byte
	_, _ = rand.Read(b[:]) // never fails
	for i := range b {
		b[i] = letters[int(b[i])%len(letters)]
	}
	return string(b[:])
}

// hash is how labels hold a name that may be longer than a label.
func hash(name string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}

func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// parseTime is a time of ours; what is none is the zero time.
func parseTime(s string) time.Time {
	t, _ := time.Parse(time.RFC3339, s)
	return t
}

func formatVersion(rv uint64) string { return strconv.FormatUint(rv, 10) }

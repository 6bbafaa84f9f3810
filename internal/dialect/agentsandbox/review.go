package agentsandbox

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"slices"
)

// typeProtobuf is how kubectl sends the kinds that are Kubernetes' own.
const typeProtobuf = "application/vnd.kubernetes.protobuf"

// attributes are what somebody asks whether they may do it.
type attributes struct{ namespace, group, resource, verb string }

// reviewAccess says yes to everything that this server would do.
func (a *API) reviewAccess(c *call) error {
	if c.r.Method != http.MethodPost {
		return wrongMethod()
	}
	body, media, err := c.content(typeJSON, typeProtobuf)
	if err != nil {
		return err
	}
	var ask attributes
	if media == typeProtobuf {
		ask, err = decodeReview(body)
	} else {
		var f fields
		f, err = decodeFields(body)
		given := inner(f, "spec", "resourceAttributes")
		ask = attributes{text(given, "namespace"), text(given, "group"), text(given, "resource"), text(given, "verb")}
	}
	if err != nil {
		return err
	}
	respond(c.w, http.StatusCreated, fields{
		"kind": "SelfSubjectAccessReview", "apiVersion": authorizationGroup + "/v1", "metadata": fields{},
		"spec":   fields{"resourceAttributes": fields{"namespace": ask.namespace, "group": ask.group, "resource": ask.resource, "verb": ask.verb}},
		"status": fields{"allowed": a.may(c.who.Tenant, ask)},
	})
	return nil
}

func (a *API) may(tenant string, ask attributes) bool {
	if ask.namespace != "" && !a.allowed(tenant, ask.namespace) {
		return false
	}
	all := coreResources
	if ask.group != "" {
		all = nil
	}
	for _, k := range kinds {
		if ask.group == k.group {
			all = append(all, k.resources(beta)...)
		}
	}
	return slices.ContainsFunc(all, func(r resource) bool { return r.Name == ask.resource && slices.Contains(r.Verbs, ask.verb) })
}

// decodeReview reads the few fields of a review that count: an envelope holds the object, which holds the spec, which holds what
// is asked.
func decodeReview(body []byte) (attributes, error) {
	rest, ok := bytes.CutPrefix(body, []byte("k8s\x00"))
	for _, number := range []uint64{2, 2, 1} {
		rest = protoField(rest, number)
	}
	if !ok {
		return attributes{}, badRequest("the body of the request is not what its content type says")
	}
	get := func(number uint64) string { return string(protoField(rest, number)) }
	return attributes{namespace: get(1), verb: get(2), group: get(3), resource: get(5)}, nil
}

// protoField finds the first field of a message that has this number and holds bytes; nil: there is none.
func protoField(message []byte, number uint64) []byte {
	for len(message) > 0 {
		tag, n := binary.Uvarint(message)
		if n <= 0 {
			return nil
		}
		message = message[n:]
		length, n := binary.Uvarint(message)
		if n <= 0 {
			return nil
		}
		message = message[n:]
		if tag&7 == 0 { // a number, which is all that there was to it
			continue
		}
		if tag&7 != 2 || length > uint64(len(message)) {
			return nil
		}
		if tag>>3 == number {
			return message[:length]
		}
		message = message[length:]
	}
	return nil
}

// reviewSelf says who is asking.
func (a *API) reviewSelf(c *call) error {
	if c.r.Method != http.MethodPost {
		return wrongMethod()
	}
	respond(c.w, http.StatusCreated, fields{
		"kind": "SelfSubjectReview", "apiVersion": authenticationGroup + "/v1", "metadata": fields{"creationTimestamp": nil},
		"status": fields{"userInfo": fields{"username": "tenant:" + c.who.Tenant, "groups": []any{"system:authenticated"}}},
	})
	return nil
}

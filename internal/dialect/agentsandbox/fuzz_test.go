package agentsandbox_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/agentsandbox"
)

func FuzzDecodeObject(f *testing.F) {
	f.Add([]byte(claimBody("a")))
	f.Add([]byte(`{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim","metadata":{"generateName":"x-","labels":{"a":"b"},"ownerReferences":[1]},"spec":{"env":[{"name":"A"}],"lifecycle":{"shutdownTime":"2026-01-01T00:00:00Z"}}}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if agentsandbox.DecodeClaim(body) == nil && !json.Valid(body) {
			t.Errorf("%q is a claim", body)
		}
	})
}

func FuzzSelector(f *testing.F) {
	for _, s := range []string{"a=b", "a in (b,c),!d", "x/y notin ()", "a!=b,", "a==b", "((", "=,="} {
		f.Add(s, "metadata.name="+s)
	}
	f.Fuzz(func(t *testing.T, labels, fields string) {
		s, err := agentsandbox.ParseSelector(labels, fields)
		if err != nil {
			return
		}
		with, without := s.MatchesLabels(map[string]string{"a": "b"}), s.MatchesLabels(nil)
		if strings.TrimSpace(labels) == "" && (!with || !without) {
			t.Errorf("%q chooses something", labels)
		}
	})
}

func FuzzPatch(f *testing.F) {
	f.Add([]byte(claimBody("a")), []byte(`[{"op":"add","path":"/spec/x/-","value":1},{"op":"copy","from":"/spec","path":"/metadata/y"},{"op":"move","from":"/kind","path":"/spec/~1"}]`), true)
	f.Add([]byte(`{"a":[1,{"b":2}]}`), []byte(`{"a":null,"c":{"d":null}}`), false)
	f.Fuzz(func(t *testing.T, object, patch []byte, list bool) {
		media := "application/merge-patch+json"
		if list {
			media = "application/json-patch+json"
		}
		if got, err := agentsandbox.Patch(object, patch, media); err == nil {
			if _, err := json.Marshal(got); err != nil {
				t.Error(err)
			}
		}
	})
}

func FuzzReview(f *testing.F) {
	f.Add([]byte("k8s\x00\x12\x06\x12\x04\x0a\x02\x0a\x00"))
	f.Fuzz(func(_ *testing.T, body []byte) { _ = agentsandbox.DecodeReview(body) })
}

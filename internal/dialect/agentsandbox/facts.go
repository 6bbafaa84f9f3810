package agentsandbox

import (
	"encoding/json"

	"github.com/covehq/cove/internal/sandbox"
)

// Annotation is where a sandbox of the domain says which object it belongs to.
const Annotation = "agentsandbox"

// imageAnnotation is where all dialects note the image that a sandbox was asked for.
const imageAnnotation = "image"

// facts is which object a sandbox belongs to.
type facts struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

func readFacts(sb sandbox.Sandbox) (f facts, ours bool) {
	given, ok := sb.Annotations[Annotation]
	return f, ok && json.Unmarshal([]byte(given), &f) == nil
}

// The labels and annotations of agent-sandbox that clients and people look at.
const (
	labelNameHash      = "agents.x-k8s.io/sandbox-name-hash"
	labelTemplateHash  = "agents.x-k8s.io/sandbox-template-ref-hash"
	labelClaimUID      = "agents.x-k8s.io/claim-uid"
	labelLaunchType    = "agents.x-k8s.io/launch-type"
	labelCreatedBy     = "agents.x-k8s.io/created-by"
	annotationPodName  = "agents.x-k8s.io/pod-name"
	annotationTemplate = "agents.x-k8s.io/sandbox-template-ref"
	annotationTrace    = "opentelemetry.io/trace-context"
	annotationID       = "cove.dev/sandbox-id"
)

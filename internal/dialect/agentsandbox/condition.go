package agentsandbox

import (
	"fmt"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// The reasons of conditions that clients know.
const (
	whyReady         = "DependenciesReady"
	whyNotReady      = "DependenciesNotReady"
	whySuspended     = "SandboxSuspended"
	whySucceeded     = "PodSucceeded"
	whyFailed        = "PodFailed"
	whyExpired       = "SandboxExpired"
	whyReconciler    = "ReconcilerError"
	whyNoTemplate    = "TemplateNotFound"
	whyNoPool        = "WarmPoolNotFound"
	whyMetadata      = "InvalidMetadata"
	whyEnv           = "EnvVarsInjectionRejected"
	whyVolumes       = "VolumeClaimTemplatesError"
	whyClaimExpired  = "ClaimExpired"
	whyMissing       = "SandboxMissing"
	whyAdoption      = "AdoptionConflict"
	whyNotSuspended  = "NotSuspended"
	whyTerminated    = "PodTerminated"
	whyCannotSuspend = "PodTerminating" // for ever: what runs it cannot stop and keep it
	messageReady     = "Pod is Ready"
	messagePending   = "Pod exists with phase: Pending"
	messageSuspended = "Sandbox is suspended"
)

// condition is one thing that is true of an object, or not.
type condition struct {
	kind, reason, message string
	status                bool
}

// conditions are what is true now; what was true before keeps its time.
func conditions(old *object, now time.Time, all ...condition) []any {
	var out []any
	for _, c := range all {
		state, since := "False", formatTime(now)
		if c.status {
			state = "True"
		}
		if before := old.condition(c.kind); text(before, "status") == state && text(before, "lastTransitionTime") != "" {
			since = text(before, "lastTransitionTime")
		}
		out = append(out, fields{
			"type": c.kind, "status": state, "reason": c.reason, "message": c.message,
			"lastTransitionTime": since, "observedGeneration": old.generation(),
		})
	}
	return out
}

// node is what a Pod is said to run on.
const node = "cove"

// boxStatus is the status of a Sandbox.
func boxStatus(o *object, running bool, all ...condition) fields {
	s := fields{
		"conditions": conditions(o, time.Now(), all...),
		"selector":   labelNameHash + "=" + hash(o.name()),
	}
	if o.spec()["service"] == true {
		s["service"], s["serviceFQDN"] = o.name(), o.name()+"."+o.namespace()+".svc.cluster.local"
	}
	if running {
		s["podIPs"], s["nodeName"] = []any{address(o.id)}, node
	}
	return s
}

// address is what stands for the IP address of a sandbox: each has another, of a range that leads nowhere, since sandboxes are
// reached through the router alone.
func address(id string) string {
	h := []byte(hash(id))
	var n uint32
	_, _ = fmt.Sscanf(string(h), "%x", &n) // eight hexadecimal digits
	return fmt.Sprintf("198.%d.%d.%d", 18+n>>16&1, n>>8&0xff, 1+n%254)
}

func pending(message string) []condition {
	return []condition{{"Ready", whyNotReady, message, false}, {"Suspended", whyNotSuspended, "", false}}
}

func running() []condition {
	return []condition{
		{"Ready", whyReady, messageReady, true}, {"Suspended", whyNotSuspended, "", false}, {"PodScheduled", "PodScheduled", "", true},
	}
}

func suspended(message string) []condition {
	return []condition{{"Ready", whySuspended, message, false}, {"Suspended", whyTerminated, message, true}}
}

// finished are the conditions of a Sandbox that has ended by itself or by somebody else.
func finished(sb sandbox.Sandbox) []condition {
	reason := whyFailed
	if sb.Cause == sandbox.CauseExited {
		reason = whySucceeded
	}
	message := "the sandbox has ended: " + string(sb.Cause)
	if sb.CauseMessage != "" {
		message += ": " + sb.CauseMessage
	}
	return []condition{{"Ready", reason, message, false}, {"Suspended", whyNotSuspended, "", false}, {"Finished", reason, message, true}}
}

func expired() []condition {
	return []condition{{"Ready", whyExpired, "Sandbox has expired", false}, {"Suspended", whyNotSuspended, "", false}}
}

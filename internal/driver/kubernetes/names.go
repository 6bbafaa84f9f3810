package kubernetes

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Labels and annotations of Pods. What is a label is selected by; a sandbox's own data is in no Pod's spec.
const (
	labelManaged  = "app.kubernetes.io/managed-by"
	labelState    = "cove.dev/state"
	labelTemplate = "cove.dev/template"
	labelDigest   = "cove.dev/digest" // of everything that the Pod was made from
	labelSandbox  = "cove.dev/sandbox"
	labelTenant   = "cove.dev/tenant" // a hash: a tenant's name need not be a label
	labelNetwork  = "cove.dev/network"

	annotationTenant   = "cove.dev/tenant"
	annotationDeadline = "cove.dev/deadline"
	annotationOwner    = "cove.dev/owner" // the server that claimed it
	annotationClaimed  = "cove.dev/claimed-at"
	annotationImage    = "cove.dev/image" // that a tenant has named

	// Names of agent-sandbox, for tools that know them.
	labelNameHash   = "agents.x-k8s.io/sandbox-name-hash"
	labelLaunchType = "agents.x-k8s.io/launch-type"

	// annotationEvict lets an autoscaler remove nodes that have only waiting Pods.
	annotationEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
)

const managedBy = "cove"

// States of a Pod, as its label says.
const (
	stateIdle    = "idle"
	stateClaimed = "claimed"
	stateRetired = "retired" // about to be deleted: nobody may claim it any more
)

// What a Pod may reach, as its label says.
const (
	networkNone     = "none"
	networkInternet = "internet"
	networkOwn      = "own" // a policy for this one sandbox says it
)

// labelValue is what Kubernetes takes as the value of a label; ids of sandboxes must be one.
var labelValue = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)

// nameHash is how agent-sandbox writes a name where a label is too short for it.
func nameHash(name string) string {
	h := fnv.New32a()
	h.Write([]byte(name)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}

func tenantHash(tenant string) string {
	sum := sha256.Sum256([]byte(tenant))
	return hex.EncodeToString(sum[:8])
}

// podName is a new name. It is what the Pod's token is derived from, so it must not be guessed before there is such a Pod: 80 bits
// of it are random. Where an image is a tenant's, it also is where our program is.
func podName(template string) string {
	return fmt.Sprintf("cove-%s-%s", strings.Trim(template[:min(len(template), 30)], "-."), strings.ToLower(rand.Text()[:16]))
}

// deadlineText is a deadline as an annotation; empty: none.
func deadlineText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// timeOf reads an annotation; what is not a time is none.
func timeOf(pod *corev1.Pod, annotation string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, pod.Annotations[annotation])
	if err != nil {
		return time.Time{}
	}
	return t
}

func isIdle(pod *corev1.Pod) bool    { return pod.Labels[labelState] == stateIdle }
func isClaimed(pod *corev1.Pod) bool { return pod.Labels[labelState] == stateClaimed }

// isOver reports whether a Pod has ended or is about to.
func isOver(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil || isTerminal(pod) }

func isTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded
}

func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && pod.Status.PodIP != ""
		}
	}
	return false
}

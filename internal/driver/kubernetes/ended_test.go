package kubernetes_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/sandbox"
)

func TestAnEndHasItsCause(t *testing.T) {
	exited := func(code int32, reason string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "sandbox", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}},
		}}}
	}
	disrupted := func(reason string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: reason, Message: "m",
		}}}
	}
	for name, c := range map[string]struct {
		status corev1.PodStatus
		want   sandbox.Cause
	}{
		"out of memory":                   {exited(137, "OOMKilled"), sandbox.CauseOOM},
		"its deadline":                    {exited(podapi.ExitExpired, "Error"), sandbox.CauseExpired},
		"its server's order":              {exited(podapi.ExitEnded, "Error"), sandbox.CauseKilled},
		"it could not start":              {exited(podapi.ExitFailed, "Error"), sandbox.CauseStartFail},
		"its PID 1":                       {exited(2, "Error"), sandbox.CauseAgentDied},
		"evicted for the node's sake":     {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "low on memory"}, sandbox.CauseEvicted},
		"evicted by a drain":              {disrupted("EvictionByEvictionAPI"), sandbox.CauseEvicted},
		"preempted":                       {disrupted("PreemptionByScheduler"), sandbox.CauseEvicted},
		"evicted by the kubelet":          {disrupted("TerminationByKubelet"), sandbox.CauseEvicted},
		"its node has gone":               {disrupted("DeletionByTaintManager"), sandbox.CauseNodeLost},
		"its node was removed":            {disrupted("DeletionByPodGC"), sandbox.CauseNodeLost},
		"its node shut down":              {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Terminated"}, sandbox.CauseNodeLost},
		"somebody deleted it":             {corev1.PodStatus{Phase: corev1.PodRunning}, sandbox.CauseDeleted},
		"it failed before it had a start": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError"}, sandbox.CauseFailed},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"cove.dev/sandbox": "sb-1"}}, Status: c.status}
			got := kubernetes.EndOf(pod)
			if got.ID != "sb-1" || got.Cause != c.want || time.Since(got.At) > time.Minute {
				t.Errorf("%+v", got)
			}
		})
	}
}

package agentsandbox

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// The words of specs that decide something.
const (
	modeRunning   = "Running"
	modeSuspended = "Suspended"

	policyRetain     = "Retain"
	policyDelete     = "Delete"
	policyForeground = "DeleteForeground"

	injectNever    = "Disallowed"
	injectNew      = "Allowed"
	injectOverride = "Overrides"
)

// reference names another object.
type reference struct {
	Name string `json:"name"`
}

// claimSpec is what we understand of a claim, in the words of both versions.
type claimSpec struct {
	WarmPoolRef *reference    `json:"warmPoolRef"`        // beta
	TemplateRef *reference    `json:"sandboxTemplateRef"` // alpha
	WarmPool    string        `json:"warmpool"`           // alpha: default, none or the name of a pool
	Lifecycle   lifecycle     `json:"lifecycle"`
	PodMetadata podMetadata   `json:"additionalPodMetadata"`
	Env         []envVariable `json:"env"`
	Volumes     []any         `json:"volumeClaimTemplates"`
}

type lifecycle struct {
	ShutdownTime   *time.Time `json:"shutdownTime"`
	TTL            *int64     `json:"ttlSecondsAfterFinished"`
	ShutdownPolicy string     `json:"shutdownPolicy"`
}

type podMetadata struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

type envVariable struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Container string `json:"containerName"`
	From      any    `json:"valueFrom"`
}

// blueprint is what a Sandbox and a SandboxTemplate have in common.
type blueprint struct {
	PodTemplate *podTemplate `json:"podTemplate"`
	Volumes     []any        `json:"volumeClaimTemplates"`
	Service     *bool        `json:"service"`
}

type podTemplate struct {
	Metadata podMetadata `json:"metadata"`
	Spec     podSpec     `json:"spec"`
}

type podSpec struct {
	Containers []container `json:"containers"`
}

type container struct {
	Name      string        `json:"name"`
	Image     string        `json:"image"`
	Env       []envVariable `json:"env"`
	EnvFrom   []any         `json:"envFrom"`
	Resources struct {
		Limits   map[string]any `json:"limits"`
		Requests map[string]any `json:"requests"`
	} `json:"resources"`
}

type sandboxSpec struct {
	blueprint
	Mode           string     `json:"operatingMode"` // beta
	Replicas       *int64     `json:"replicas"`      // alpha
	ShutdownTime   *time.Time `json:"shutdownTime"`
	ShutdownPolicy string     `json:"shutdownPolicy"`
}

// first is the container that a sandbox stands for.
func (b blueprint) first() (container, error) {
	if b.PodTemplate == nil || len(b.PodTemplate.Spec.Containers) == 0 {
		return container{}, fault.New(fault.Invalid, "spec.podTemplate.spec.containers: at least one container is needed")
	}
	return b.PodTemplate.Spec.Containers[0], nil
}

func (s sandboxSpec) suspended() bool {
	return s.Mode == modeSuspended || s.Replicas != nil && *s.Replicas == 0
}

type templateSpec struct {
	blueprint
	EnvPolicy    string `json:"envVarsInjectionPolicy"`
	VolumePolicy string `json:"volumeClaimTemplatesPolicy"`
	Management   string `json:"networkPolicyManagement"`
	Network      *struct {
		Egress []struct {
			To    []struct{} `json:"to"`
			Ports []struct{} `json:"ports"`
		} `json:"egress"`
	} `json:"networkPolicy"` // read by networkOf; here so that one of another shape is refused
}

type poolSpec struct {
	Replicas    *int64     `json:"replicas"`
	TemplateRef *reference `json:"sandboxTemplateRef"`
	Update      struct {
		Type string `json:"type"`
	} `json:"updateStrategy"`
}

// readSpec reads a spec of the store, which was checked when it came.
func readSpec[T any](o *object) (s T) {
	_ = json.Unmarshal([]byte(encode(known(o.spec(), reflect.TypeFor[T]()))), &s) // checked
	return s
}

// known is what a struct has a name for, letter by letter. encoding/json takes "Spec" for "spec" as well, and whoever reads the
// same object by its names then finds nothing there.
func known(v any, t reflect.Type) any {
	switch t.Kind() {
	case reflect.Pointer:
		return known(v, t.Elem())
	case reflect.Slice:
		if l, ok := v.([]any); ok {
			c := make([]any, len(l))
			for i, v := range l {
				c[i] = known(v, t.Elem())
			}
			return c
		}
	case reflect.Struct:
		if f, ok := v.(fields); ok {
			c := fields{}
			for _, field := range reflect.VisibleFields(t) {
				name := field.Tag.Get("json")
				if v, ok := f[name]; ok && name != "" {
					c[name] = known(v, field.Type)
				}
			}
			return c
		}
	}
	return v
}

// maxEnv and maxContainers bound lists of a spec.
const (
	maxEnv        = 256
	maxContainers = 16
)

// check refuses an object whose spec cannot be meant, as the schemas of the kinds do.
func check(o *object) error {
	switch o.kind {
	case claimKind:
		return decodeSpec(o, checkClaim)
	case sandboxKind:
		return decodeSpec(o, checkSandbox)
	case templateKind:
		return decodeSpec(o, checkTemplate)
	case poolKind:
		return decodeSpec(o, checkPool)
	}
	return nil
}

func decodeSpec[T any](o *object, check func(*object, T) error) error {
	var spec T
	err := json.Unmarshal([]byte(encode(known(o.spec(), reflect.TypeFor[T]()))), &spec)
	var wrong *json.UnmarshalTypeError
	var when *time.ParseError
	switch {
	case errors.As(err, &wrong):
		return invalid(o.kind, o.name(), "spec."+wrong.Field, "Invalid value: %q: must be of another type", wrong.Value)
	case errors.As(err, &when):
		return invalid(o.kind, o.name(), "spec", "Invalid value: %.60q: must be a time such as 2006-01-02T15:04:05Z", when.Value)
	case err != nil:
		return invalid(o.kind, o.name(), "spec", "Invalid value: it cannot be understood")
	}
	return check(o, spec)
}

func checkClaim(o *object, s claimSpec) error {
	field, ref := "spec.warmPoolRef.name", s.WarmPoolRef
	if o.version == alpha {
		field, ref = "spec.sandboxTemplateRef.name", s.TemplateRef
	}
	switch {
	case ref == nil || ref.Name == "":
		return invalid(o.kind, o.name(), field, "Required value")
	case !isSubdomain(ref.Name):
		return invalid(o.kind, o.name(), field, "Invalid value: %.80q: is not a name", ref.Name)
	case s.Lifecycle.TTL != nil && *s.Lifecycle.TTL < 0:
		return invalid(o.kind, o.name(), "spec.lifecycle.ttlSecondsAfterFinished", "Invalid value: %d: should be greater than or equal to 0", *s.Lifecycle.TTL)
	case len(s.Env) > maxEnv:
		return invalid(o.kind, o.name(), "spec.env", "Too many: %d: must have at most %d items", len(s.Env), maxEnv)
	}
	for _, e := range s.Env {
		if e.Name == "" {
			return invalid(o.kind, o.name(), "spec.env.name", "Required value")
		}
	}
	return oneOf(o, "spec.lifecycle.shutdownPolicy", s.Lifecycle.ShutdownPolicy, policyRetain, policyDelete, policyForeground)
}

func checkSandbox(o *object, s sandboxSpec) error {
	if err := checkBlueprint(o, s.blueprint); err != nil {
		return err
	}
	if s.Replicas != nil && *s.Replicas != 0 && *s.Replicas != 1 {
		return invalid(o.kind, o.name(), "spec.replicas", "Invalid value: %d: a Sandbox has 0 or 1", *s.Replicas)
	}
	if err := oneOf(o, "spec.operatingMode", s.Mode, modeRunning, modeSuspended); err != nil {
		return err
	}
	return oneOf(o, "spec.shutdownPolicy", s.ShutdownPolicy, policyRetain, policyDelete)
}

func checkTemplate(o *object, s templateSpec) error {
	if err := checkBlueprint(o, s.blueprint); err != nil {
		return err
	}
	if err := oneOf(o, "spec.envVarsInjectionPolicy", s.EnvPolicy, injectNever, injectNew, injectOverride); err != nil {
		return err
	}
	if err := oneOf(o, "spec.networkPolicyManagement", s.Management, "Managed", "Unmanaged"); err != nil {
		return err
	}
	return oneOf(o, "spec.volumeClaimTemplatesPolicy", s.VolumePolicy, injectNever, injectNew, injectOverride)
}

func checkBlueprint(o *object, b blueprint) error {
	if b.PodTemplate == nil {
		return invalid(o.kind, o.name(), "spec.podTemplate", "Required value")
	}
	switch n := len(b.PodTemplate.Spec.Containers); {
	case n == 0:
		return invalid(o.kind, o.name(), "spec.podTemplate.spec.containers", "Required value: at least one container is needed")
	case n > maxContainers:
		return invalid(o.kind, o.name(), "spec.podTemplate.spec.containers", "Too many: %d: must have at most %d items", n, maxContainers)
	}
	if b.PodTemplate.Spec.Containers[0].Image == "" {
		return invalid(o.kind, o.name(), "spec.podTemplate.spec.containers[0].image", "Required value")
	}
	return nil
}

func checkPool(o *object, s poolSpec) error {
	switch {
	case s.TemplateRef == nil || s.TemplateRef.Name == "":
		return invalid(o.kind, o.name(), "spec.sandboxTemplateRef.name", "Required value")
	case s.Replicas == nil && o.version == alpha:
		return invalid(o.kind, o.name(), "spec.replicas", "Required value")
	case s.Replicas != nil && (*s.Replicas < 0 || *s.Replicas > 1<<31-1):
		return invalid(o.kind, o.name(), "spec.replicas", "Invalid value: %d: should be greater than or equal to 0", *s.Replicas)
	}
	return oneOf(o, "spec.updateStrategy.type", s.Update.Type, "OnReplenish", "Recreate")
}

func oneOf(o *object, field, value string, allowed ...string) error {
	if value == "" {
		return nil
	}
	for _, a := range allowed {
		if a == value {
			return nil
		}
	}
	return invalid(o.kind, o.name(), field, "Unsupported value: %.60q: supported values: %s", value, strings.Join(allowed, ", "))
}

package sandbox

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/template"
)

// What a Spec may hold. The environment travels to the agent in one message of agentapi.MaxMessage bytes,
// together with the template's.
const (
	maxMetadata      = 64
	maxMetadataKey   = 128
	maxMetadataValue = 1 << 10
	maxEnv           = 256
	maxEnvBytes      = 32 << 10
	maxKey           = 128
	maxIdempotency   = 255
	maxTemplate      = 128
	maxAnnotations   = 16
	maxAnnotation    = 64 << 10
)

// The least that a sandbox can start with: below it the agent itself does not fit.
const (
	minCPUs      = 0.01
	minMemory    = 16 << 20
	minPids      = 4
	minDisk      = 1 << 20
	minOpenFiles = 16
)

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// validate refuses a Spec that is wrong whatever the server's configuration is.
func (s Spec) validate() error {
	if err := checkName("template", s.Template, maxTemplate); err != nil {
		return err
	}
	if err := checkName("key", s.Key, maxKey); err != nil {
		return err
	}
	if strings.HasPrefix(s.Key, "/") || strings.Contains("/"+s.Key+"/", "/../") {
		return fault.New(fault.Invalid, "the key %q reads as a path out of a folder; choose another", s.Key)
	}
	if err := checkName("idempotency key", s.IdempotencyKey, maxIdempotency); err != nil {
		return err
	}
	if err := checkMetadata(s.Metadata); err != nil {
		return err
	}
	if err := firstError(checkAnnotations(s.Annotations), checkEnv(s.Env), checkIDEnv(s.IDEnv)); err != nil {
		return err
	}
	switch s.Storage {
	case "", StorageVolatile, StorageDurable, StorageTmpfs:
	default:
		return fault.New(fault.Invalid, "unknown storage %q: use %s, %s or %s", s.Storage, StorageVolatile, StorageDurable, StorageTmpfs)
	}
	if err := firstError(checkAction("idle", s.IdleAction), checkAction("deadline", s.DeadlineAction)); err != nil {
		return err
	}
	if s.ResumeLifetime < 0 {
		return fault.New(fault.Invalid, "the lifetime after a resume cannot be negative")
	}
	if err := CheckMounts(s.Mounts); err != nil {
		return err
	}
	if s.Network != nil {
		return s.Network.Validate()
	}
	return nil
}

func checkAction(what string, a IdleAction) error {
	switch a {
	case "", IdleKill, IdlePause:
		return nil
	}
	return fault.New(fault.Invalid, "unknown %s action %.40q: use %s or %s", what, a, IdleKill, IdlePause)
}

// digest tells two Specs under one idempotency key apart.
func (s Spec) digest() string {
	if s.IdempotencyKey == "" {
		return ""
	}
	s.ID = "" // a retry has another
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("a spec is plain data: %v", err)) // NaN limits were refused before
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func checkName(what, s string, limit int) error {
	if n := utf8.RuneCountInString(s); n > limit {
		return fault.New(fault.Invalid, "the %s has %d characters; at most %d are allowed", what, n, limit)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return fault.New(fault.Invalid, "the %s is not printable text", what)
	}
	return nil
}

func checkMetadata(metadata map[string]string) error {
	if len(metadata) > maxMetadata {
		return fault.New(fault.Invalid, "metadata has %d keys; at most %d are allowed", len(metadata), maxMetadata)
	}
	for k, v := range metadata {
		switch {
		case k == "":
			return fault.New(fault.Invalid, "metadata has an empty key")
		case utf8.RuneCountInString(k) > maxMetadataKey:
			return fault.New(fault.Invalid, "metadata key %.20q… is too long; at most %d characters are allowed", k, maxMetadataKey)
		case utf8.RuneCountInString(v) > maxMetadataValue:
			return fault.New(fault.Invalid, "the value of metadata key %q has %d characters; at most %d are allowed", k, utf8.RuneCountInString(v), maxMetadataValue)
		case !utf8.ValidString(k), !utf8.ValidString(v):
			return fault.New(fault.Invalid, "metadata key %q or its value is not UTF-8", k)
		}
	}
	return nil
}

// checkAnnotations bounds what a dialect keeps with a sandbox, since some of it is its caller's.
func checkAnnotations(annotations map[string]string) error {
	if len(annotations) > maxAnnotations {
		return fault.New(fault.Invalid, "%d annotations are too many; at most %d are allowed", len(annotations), maxAnnotations)
	}
	for k, v := range annotations {
		switch {
		case len(v) > maxAnnotation:
			return fault.New(fault.Invalid, "annotation %.40q has %d bytes; at most %d are allowed", k, len(v), maxAnnotation)
		case k == "" || len(k) > maxMetadataKey || !utf8.ValidString(k) || !utf8.ValidString(v):
			return fault.New(fault.Invalid, "annotation %.40q: its name or its value is not text of the right size", k)
		}
	}
	return nil
}

func checkIDEnv(name string) error {
	if name != "" && !envName.MatchString(name) {
		return fault.New(fault.Invalid, "%.60q is not a name for an environment variable", name)
	}
	return nil
}

func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return fault.New(fault.Invalid, "the environment has %d variables; at most %d are allowed", len(env), maxEnv)
	}
	for k, v := range env {
		if !envName.MatchString(k) {
			return fault.New(fault.Invalid, "%.60q is not a name for an environment variable", k)
		}
		if strings.ContainsRune(v, 0) || !utf8.ValidString(v) {
			return fault.New(fault.Invalid, "the value of environment variable %q is not text", k)
		}
	}
	// As JSON, because that is how it travels: a control character takes six bytes.
	b, err := json.Marshal(env)
	if err != nil {
		return fault.Wrap(fault.Invalid, err, "the environment cannot be encoded")
	}
	if len(b) > maxEnvBytes {
		return fault.New(fault.Invalid, "the environment has %d bytes; at most %d are allowed", len(b), maxEnvBytes)
	}
	return nil
}

// orLimits fills what a leaves open from b.
func orLimits(a, b template.Limits) template.Limits {
	return template.Limits{
		CPUs:        cmp.Or(a.CPUs, b.CPUs),
		MemoryBytes: cmp.Or(a.MemoryBytes, b.MemoryBytes),
		Pids:        cmp.Or(a.Pids, b.Pids),
		DiskBytes:   cmp.Or(a.DiskBytes, b.DiskBytes),
		OpenFiles:   cmp.Or(a.OpenFiles, b.OpenFiles),
	}
}

// capLimits lowers to the maximum what nobody asked for by name.
func capLimits(a, most template.Limits) template.Limits {
	return template.Limits{
		CPUs:        lower(a.CPUs, most.CPUs),
		MemoryBytes: lower(a.MemoryBytes, most.MemoryBytes),
		Pids:        lower(a.Pids, most.Pids),
		DiskBytes:   lower(a.DiskBytes, most.DiskBytes),
		OpenFiles:   lower(a.OpenFiles, most.OpenFiles),
	}
}

func lower[T int | int64 | float64](a, most T) T {
	if most > 0 && a > most {
		return most
	}
	return a
}

// checkLimits refuses limits that were asked for and cannot be given; zero fields were not asked for.
func checkLimits(l, most template.Limits) error {
	if math.IsNaN(l.CPUs) || math.IsInf(l.CPUs, 0) {
		return fault.New(fault.Invalid, "cpus is not a number")
	}
	return firstError(
		inRange("cpus", "", l.CPUs, minCPUs, most.CPUs),
		inRange("memory", " bytes", l.MemoryBytes, minMemory, most.MemoryBytes),
		inRange("pids", "", l.Pids, minPids, most.Pids),
		inRange("disk", " bytes", l.DiskBytes, minDisk, most.DiskBytes),
		inRange("open files", "", l.OpenFiles, minOpenFiles, most.OpenFiles),
	)
}

func inRange[T int | int64 | float64](what, unit string, v, least, most T) error {
	switch {
	case v == 0:
		return nil
	case v < 0:
		return fault.New(fault.Invalid, "%s cannot be negative: %v%s", what, v, unit)
	case v < least:
		return fault.New(fault.Invalid, "%s of %v%s is too little to start with; at least %v%s are needed", what, v, unit, least, unit)
	case most > 0 && v > most:
		return fault.New(fault.Invalid, "%s of %v%s is more than the %v%s this server allows", what, v, unit, most, unit)
	}
	return nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// lifetime turns what was asked into a duration; negative is none.
func (c Config) lifetime(asked time.Duration) (time.Duration, error) {
	d := cmp.Or(asked, c.DefaultLifetime)
	switch {
	case c.MaxLifetime == 0:
		return d, nil
	case d < 0:
		return 0, fault.New(fault.Invalid, "a sandbox without a deadline is not allowed here; the longest lifetime is %v", c.MaxLifetime)
	case d > c.MaxLifetime:
		return 0, fault.New(fault.Invalid, "a lifetime of %v is longer than the %v this server allows", d, c.MaxLifetime)
	}
	return d, nil
}

// atMost lowers a lifetime that nobody insists on to the maximum.
func (c Config) atMost(d time.Duration) time.Duration {
	if c.MaxLifetime > 0 {
		return min(d, c.MaxLifetime)
	}
	return d
}

// checkNetwork refuses a policy that the operator does not allow the tenant, or that the driver would not enforce.
func (m *Manager) checkNetwork(n policy.Network, tenant string) error {
	if err := firstError(n.Validate(), m.cfg.Networks.Check(n, tenant)); err != nil {
		return err
	}
	caps := m.driver.Caps()
	open := n.Mode == policy.Internet && len(n.Deny) == 0 // and so is what it allows
	if !open && !caps.Network {
		return fault.New(fault.Unsupported, "the %s driver cannot restrict a sandbox's network", caps.Name)
	}
	return nil
}

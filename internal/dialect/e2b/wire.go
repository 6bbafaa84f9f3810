package e2b

import (
	"encoding/json"
	"math"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/sandbox"
)

// clientID stands where E2B named the machine; SDKs want the field and use it for nothing.
const clientID = "cove"

// never is the end of a sandbox without a deadline: another dialect can make one, and SDKs want a time.
var never = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// Sandbox is what a create, a connect and a fork answer.
type Sandbox struct {
	TemplateID   string  `json:"templateID"`
	SandboxID    string  `json:"sandboxID"`
	ClientID     string  `json:"clientID"`
	EnvdVersion  string  `json:"envdVersion"`
	Alias        string  `json:"alias,omitempty"`
	EnvdToken    string  `json:"envdAccessToken,omitempty"`
	TrafficToken *string `json:"trafficAccessToken"`
	Domain       *string `json:"domain"`
}

// Listed is a sandbox in a listing.
type Listed struct {
	TemplateID  string            `json:"templateID"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
	Alias       string            `json:"alias,omitempty"`
	Metadata    map[string]string `json:"metadata"`
}

// Detail is one sandbox with everything that its owner may know.
type Detail struct {
	Listed
	EnvdToken string          `json:"envdAccessToken,omitempty"`
	Internet  *bool           `json:"allowInternetAccess"`
	Domain    *string         `json:"domain"`
	Network   json.RawMessage `json:"network,omitempty"`
	Lifecycle Lifecycle       `json:"lifecycle"`
	PauseMode string          `json:"pauseMode,omitempty"`
}

// Lifecycle is what happens to a sandbox at its deadline and afterwards.
type Lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

func (a *API) wireSandbox(sb sandbox.Sandbox) (Sandbox, error) {
	o, err := target.Decode(sb)
	if err != nil {
		return Sandbox{}, err
	}
	w := Sandbox{
		TemplateID: o.TemplateID, SandboxID: sb.ID, ClientID: clientID, EnvdVersion: a.cfg.Version, Alias: o.Alias,
		EnvdToken: a.envdToken(sb.ID, o), Domain: a.domain(),
	}
	if o.PrivateTraffic {
		token := a.tokens.Traffic(sb.ID)
		w.TrafficToken = &token
	}
	return w, nil
}

func (a *API) wireListed(sb sandbox.Sandbox, o target.Options) Listed {
	w := Listed{
		TemplateID: o.TemplateID, SandboxID: sb.ID, ClientID: clientID, StartedAt: sb.CreatedAt, EndAt: sb.Deadline,
		CPUCount: cpus(sb.Limits.CPUs), MemoryMB: mebi(sb.Limits.MemoryBytes), DiskSizeMB: mebi(sb.Limits.DiskBytes),
		State: "running", EnvdVersion: a.cfg.Version, Alias: o.Alias, Metadata: sb.Metadata,
	}
	if w.Metadata == nil {
		w.Metadata = map[string]string{}
	}
	if sb.Deadline.IsZero() {
		w.EndAt = never
	}
	if sb.State == sandbox.StatePaused {
		w.State, w.EndAt = "paused", sb.PausedAt
	}
	return w
}

func (a *API) wireDetail(sb sandbox.Sandbox) (Detail, error) {
	o, err := target.Decode(sb)
	if err != nil {
		return Detail{}, err
	}
	w := Detail{
		Listed: a.wireListed(sb, o), EnvdToken: a.envdToken(sb.ID, o), Internet: o.Internet, Domain: a.domain(),
		Network:   o.Network,
		Lifecycle: Lifecycle{AutoResume: sb.AutoResume, OnTimeout: string(sandbox.IdleKill)},
	}
	if sb.DeadlineAction == sandbox.IdlePause {
		w.Lifecycle.OnTimeout = string(sandbox.IdlePause)
	}
	if sb.State == sandbox.StatePaused {
		w.PauseMode = "full"
		if sb.Cold {
			w.PauseMode = "filesystem"
		}
	}
	return w, nil
}

func (a *API) envdToken(id string, o target.Options) string {
	if !o.Secure {
		return ""
	}
	return a.tokens.Envd(id)
}

func (a *API) domain() *string {
	if a.cfg.Domain == "" {
		return nil
	}
	return &a.cfg.Domain
}

func (a *API) answerSandbox(c *call, status int, sb sandbox.Sandbox) error {
	w, err := a.wireSandbox(sb)
	if err != nil {
		return err
	}
	return c.answer(status, w)
}

// cpus is a whole number, as SDKs want it.
func cpus(n float64) int { return max(1, int(math.Ceil(n))) }

func mebi(n int64) int64 { return n >> 20 }

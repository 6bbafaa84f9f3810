// Package podapi is what the driver and its program inside a Pod say to each other: who each of them is, and the few words before and
// beside the agent's own protocol. It knows neither the API server nor what a Pod runs.
package podapi

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// Port is where the program in the Pod listens. It listens once it is warm, so that a port that takes connections is a Pod that is ready.
const Port = 7070

// Dir is where the container has the volume that the init container has filled, where its image is the operator's. In it is ProgramName.
const (
	Dir         = "/run/cove"
	ProgramName = "cove-pod"
)

// Variable is the environment variable of the container that holds a Settings as JSON. The program takes it out of its environment before it
// starts anything.
const Variable = "COVE_POD"

// Exit statuses of the program, which is PID 1 of its container: the only words about its end that nothing inside can forge.
const (
	ExitFailed  = 70 // it could not start; the container's log says why
	ExitExpired = 80 // the deadline of its sandbox passed
	ExitEnded   = 81 // it was told to end
)

// Settings is what a Pod is born with: the same for every sandbox that may come, and nothing of a tenant's.
type Settings struct {
	Name      string   `json:"name"`              // of the Pod
	Token     string   `json:"token"`             // hex; proves to the server that this is the Pod it made
	Authority []byte   `json:"ca"`                // DER certificate of who may command it
	Address   string   `json:"address,omitempty"` // where it listens; empty: everywhere, on Port
	Python    string   `json:"python,omitempty"`  // empty: no kernels
	Preload   []string `json:"preload,omitempty"`
	Warmup    string   `json:"warmup,omitempty"`
	UserSite  string   `json:"user_site,omitempty"`
	User      string   `json:"user,omitempty"` // of commands, where the container runs as root
	Home      string   `json:"home,omitempty"` // of the container's user, where that is not root
	Workdir   string   `json:"workdir,omitempty"`
	Foreign   bool     `json:"foreign,omitempty"` // nobody has described the image: its own python3 runs kernels, and its user's home is what it says
	Dir       string   `json:"dir,omitempty"`     // where the volume is with the program and the kernel's files; empty: Dir
}

// The first byte of a connection, behind the proof, says what it is for.
const (
	ForAgent   = 'a' // one operation of agentapi
	ForControl = 'c' // one Order
)

// Op is what an Order asks for.
type Op string

// The orders.
const (
	OpBoot     Op = "boot"     // become a sandbox; answered when its default kernel takes cells
	OpKernel   Op = "kernel"   // put a fresh kernel of that name into it, forked from the zygote
	OpDeadline Op = "deadline" // end after Left; zero: never
	OpUsage    Op = "usage"
	OpStatus   Op = "status"
	OpEnd      Op = "end" // exit at once
)

// Order is one request of the server's to the program in the Pod.
type Order struct {
	Op     Op             `json:"op"`
	Boot   *agentapi.Boot `json:"boot,omitempty"`
	Kernel string         `json:"kernel,omitempty"`
	// Left is how long the sandbox may still live. A length, not a time: clocks of nodes differ.
	Left time.Duration `json:"left,omitempty"`
}

// Status is what a Pod says of itself.
type Status struct {
	Sandbox string `json:"sandbox,omitempty"` // empty: it waits for one
	Warm    bool   `json:"warm"`              // it has a zygote
}

// Booted is the answer to OpBoot.
type Booted struct {
	Kernel bool `json:"kernel"` // the default kernel takes cells
	Warm   bool `json:"warm"`   // it was forked from the zygote
}

// Usage is the answer to OpUsage: what the container's cgroup has counted. Zero where it says nothing.
type Usage struct {
	CPUMS       int64 `json:"cpu_ms"`
	MemoryBytes int64 `json:"memory_bytes"`
	PeakBytes   int64 `json:"peak_bytes"`
	Pids        int   `json:"pids"`
	OOMKills    int   `json:"oom_kills"`
}

// EncodeSettings is the value of Variable.
func EncodeSettings(s Settings) (string, error) {
	raw, err := json.Marshal(s)
	return string(raw), err
}

// DecodeSettings reads it.
func DecodeSettings(text string) (Settings, error) {
	var s Settings
	if text == "" {
		return s, fmt.Errorf("%s is not set: this program is started by Cove in a Pod", Variable)
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("%s: %w", Variable, err)
	}
	return s, nil
}

// answerError is an answer's refusal as a fault.
func answerError(end agentapi.End) error {
	if end.Outcome != agentapi.OutcomeRefused || end.Fault == nil {
		return nil
	}
	return fault.New(end.Fault.Kind, "%s", end.Fault.Message)
}

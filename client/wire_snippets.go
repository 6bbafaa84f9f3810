package client

// SnippetRequest runs Python code in a fresh process of a fresh sandbox, which ends with it.
type SnippetRequest struct {
	Code string `json:"code"`
	// TimeoutSeconds of wall time; zero is 10.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// CPUSeconds of processor time; zero is 8.
	CPUSeconds int `json:"cpu_seconds,omitempty"`
	// MemoryMB of address space; zero is 128.
	MemoryMB int `json:"memory_mb,omitempty"`
	// OpenFiles at once; zero is 32.
	OpenFiles int `json:"open_files,omitempty"`
	// Env is all the environment there is.
	Env map[string]string `json:"env,omitempty"`
	// Network lets the snippet reach the internet; by default nothing leaves.
	Network bool `json:"network,omitempty"`
	// Template to start from; empty is the server's default.
	Template string `json:"template,omitempty"`
	// Sandbox runs it in this living sandbox of yours instead, which goes on.
	Sandbox string `json:"sandbox,omitempty"`
}

// SnippetResult is how a snippet ended.
type SnippetResult struct {
	// ExitCode is -1 when the time was over, and minus the signal's number when a signal ended it.
	ExitCode int `json:"exit_code"`
	// Stdout and Stderr with bytes that are no UTF-8 replaced.
	Stdout    string   `json:"stdout"`
	Stderr    string   `json:"stderr"`
	TimedOut  bool     `json:"timed_out"`
	Truncated bool     `json:"truncated,omitempty"`
	Signal    string   `json:"signal,omitempty"`
	OOM       bool     `json:"oom,omitempty"`
	Message   string   `json:"message,omitempty"`
	Sandbox   string   `json:"sandbox"`
	Usage     RunUsage `json:"usage,omitzero"`
}

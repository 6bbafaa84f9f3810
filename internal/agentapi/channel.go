package agentapi

// A driver reaches its agent over a channel: a SEQPACKET socket whose messages are JSON and may carry descriptors.
// Nothing inside the sandbox can reach it, and no name in the sandbox's file system or network leads to it.
//
// The agent's first channel is descriptor 3 and belongs to whoever made the sandbox; when it closes, the agent exits,
// and the sandbox with it: a sandbox that nobody watches must not outlive its maker. A further channel, received by
// MessageChannel, only takes MessageConn and MessageBranch; when it closes the agent forgets it and goes on.

// MessageType is the kind of a channel message.
type MessageType string

// The messages.
const (
	MessageBoot    MessageType = "boot"    // Boot; before anything else, once or, where the first is Expected, twice. Kernel and Channel may come with it
	MessageConn    MessageType = "conn"    // descriptors: a stream socket that carries one operation
	MessageBranch  MessageType = "branch"  // descriptors: a stream socket that carries OpBranch, and the socket it gives the kernel
	MessageChannel MessageType = "channel" // descriptors: another channel
	MessageKernel  MessageType = "kernel"  // Kernel; descriptors: see KernelDescriptors
	MessageExit    MessageType = "exit"    // KernelExit: how an adopted kernel's process ended, as its parent saw it
	MessageOOM     MessageType = "oom"     // Text: the host killed something here for lack of memory; a sentence that names it
)

// KernelDescriptors is the order of the descriptors of MessageKernel: the kernel's frame socket, the read ends of its
// stdout and stderr, and a pidfd of its process.
const KernelDescriptors = 4

// Message is one message on a channel.
type Message struct {
	Type   MessageType `json:"type"`
	Boot   *Boot       `json:"boot,omitempty"`
	Kernel *Adoption   `json:"kernel,omitempty"`
	Exit   *KernelExit `json:"exit,omitempty"`
	Text   string      `json:"text,omitempty"`
	// Channel: a boot that is not Expected comes with another channel, whose descriptor is the last. Before it are those of Kernel, if there is one.
	Channel bool `json:"channel,omitempty"`
}

// Adoption hands a kernel that was forked outside to the agent. A living kernel of that name is killed first.
type Adoption struct {
	Name  string `json:"name"`
	Token string `json:"token"` // names this process in a later KernelExit
}

// KernelExit tells how an adopted kernel ended: the agent is not its parent and cannot know.
type KernelExit struct {
	Token   string `json:"token"`
	Code    int    `json:"code"`             // exit status, or −1
	Signal  string `json:"signal,omitempty"` // "SIGKILL"
	OOM     bool   `json:"oom,omitempty"`
	Message string `json:"message,omitempty"` // of an OOM: a sentence that names the victim
}

// MaxMessage bounds a channel message.
const MaxMessage = 64 << 10

// Between agent and kernel the same frames travel on a stream socket. The agent sends FrameRequest with KernelRequest;
// the kernel answers with FrameEvent: EventReady once (PID, Message = "ipython <version>" or "plain"), then for each
// request EventStarted, results and errors, and EventEnd with Outcome ok, error or interrupted. Output does not travel here: it is
// read from the kernel's stdout and stderr pipes, so that subprocesses and C code are heard too; the kernel flushes
// before each event, and the agent drains the pipes before it passes that event on.

// KernelBirth is the first frame (FrameControl) that a kernel forked from a zygote reads on its socket: what is its alone
// and must not pass through the zygote, whose memory its siblings inherit.
type KernelBirth struct {
	Env       map[string]string `json:"env,omitempty"`
	OpenFiles int               `json:"open_files,omitempty"`
	// Branch: the rest of its memory is another kernel's. It becomes that by what comes next on its socket, and reads
	// then another of these.
	Branch bool `json:"branch,omitempty"`
	// Expected: nobody has asked for it yet, and this is what most would ask for. Another follows, which is the last.
	Expected bool `json:"expected,omitempty"`
	// Same: it was as expected. The environment is the one that came before, and is not told again.
	Same bool `json:"same,omitempty"`
}

// KernelRequest asks a kernel to run one cell.
type KernelRequest struct {
	ID       string            `json:"id"`
	Code     string            `json:"code"`
	Env      map[string]string `json:"env,omitempty"`
	Cwd      string            `json:"cwd,omitempty"`
	Silent   bool              `json:"silent,omitempty"`
	Rich     bool              `json:"rich,omitempty"`
	Notebook bool              `json:"notebook,omitempty"`
	State    bool              `json:"state,omitempty"`
}

// SoonerBy is what every process of a sandbox has on top of its agent's oom_score_adj, so that it is ended before the agent when memory
// runs out: half of all memory is added to what it has.
const SoonerBy = 500

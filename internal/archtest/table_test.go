package archtest_test

// A group is a ring of the architecture; docs/ARCHITECTURE.md draws them. What a group may import holds for each of its
// packages; a package's own line may add to it.
type group struct {
	name  string
	may   []string // of ours: a path below the module, a tree written as "internal/x/...", or "*" for everything
	never []string // of the standard library and of guests, whatever a line says; trees as above
}

var (
	words = group{
		name:  "words",
		may:   []string{"internal/fault", "internal/agentapi", "internal/auth", "internal/diskspace"},
		never: []string{"net/http/...", "database/sql/...", "os/exec"},
	}
	domain = group{
		name:  "domain",
		may:   append([]string{"internal/policy"}, words.may...),
		never: []string{"net/http/...", "database/sql/..."},
	}
	adapters = group{
		name: "adapters",
		may:  append([]string{"internal/sandbox", "internal/template"}, domain.may...),
	}
	edges = group{
		name:  "edges",
		may:   adapters.may,
		never: []string{"database/sql/..."},
	}
	public = group{
		name: "public",
	}
	alone = group{
		name: "alone", // imports nothing of ours
	}
	inside = group{
		name:  "inside",
		may:   append([]string{"kernel"}, words.may...),
		never: []string{"net/http/...", "database/sql/..."},
	}
	wiring = group{
		name: "wiring",
		may:  []string{"*"},
	}
)

// A line is what one package may import. A new package fails until its line is written; writing it is the design review.
type line struct {
	path   string // below the module
	group  group
	also   []string // of ours, beyond its group
	guests []string // modules of others, by the beginning of their import path
}

// Test files are free: they use real parts rather than doubles.
var table = []line{
	// words: vocabulary, standard library only
	{path: "internal/fault", group: words},
	{path: "internal/agentapi", group: words},
	{path: "internal/auth", group: words},
	{path: "internal/diskspace", group: words},

	// domain: true whatever the protocol or the backend
	{path: "internal/policy", group: domain},
	{path: "internal/template", group: domain, guests: []string{"github.com/BurntSushi/toml", "golang.org/x/sys"}},
	{path: "internal/template/ensure", group: domain, also: []string{"internal/template"}},
	{path: "internal/sandbox", group: domain, also: []string{"internal/template"}},

	{path: "internal/snippet", group: domain, also: []string{"internal/sandbox"}},
	{path: "internal/artifact", group: domain},
	{path: "internal/dataset", group: domain, also: []string{"internal/sandbox", "internal/artifact"}},
	{path: "internal/session", group: domain, also: []string{"internal/sandbox", "internal/template", "internal/artifact", "internal/dataset"}},

	// adapters: implement what the domain asked for; ignorant of each other
	{path: "internal/driver/native", group: adapters, guests: []string{"golang.org/x/sys"},
		also: []string{"internal/driver/native/maker", "internal/driver/native/wire"}},
	{path: "internal/driver/native/maker", group: adapters, guests: []string{"golang.org/x/sys", "golang.org/x/net/bpf"},
		also: []string{"internal/driver/native/cgroup", "internal/driver/native/network", "internal/driver/native/resolver",
			"internal/driver/native/seccomp", "internal/driver/native/trace", "internal/driver/native/unpack", "internal/driver/native/wire", "kernel"}},
	{path: "internal/driver/native/unpack", group: adapters, also: []string{"internal/driver/native/seccomp"},
		guests: []string{"golang.org/x/sys", "github.com/klauspost/compress"}},
	{path: "internal/driver/native/trace", group: adapters, guests: []string{"golang.org/x/sys"}},
	{path: "internal/driver/native/wire", group: adapters, guests: []string{"golang.org/x/sys"}},
	{path: "internal/driver/native/cgroup", group: adapters, guests: []string{"golang.org/x/sys"}},
	{path: "internal/driver/native/seccomp", group: adapters, guests: []string{"golang.org/x/sys", "golang.org/x/net/bpf"}},
	{path: "internal/driver/native/network", group: adapters,
		guests: []string{"golang.org/x/sys", "github.com/google/nftables", "github.com/vishvananda/netlink"}},
	{path: "internal/driver/native/hostcheck", group: adapters,
		guests: []string{"golang.org/x/sys", "github.com/google/nftables", "github.com/vishvananda/netlink"}},
	{path: "internal/driver/native/resolver", group: adapters, guests: []string{"golang.org/x/sys", "github.com/miekg/dns"}},
	{path: "internal/driver/drivertest", group: adapters},
	{path: "internal/driver/inproc", group: adapters, also: []string{"internal/agent"}}, // a real agent in a goroutine
	{path: "internal/driver/kubernetes", group: adapters, also: []string{"internal/driver/kubernetes/podapi"}, // the one that knows Kubernetes
		guests: []string{"k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go", "k8s.io/klog"}},
	{path: "internal/driver/kubernetes/podapi", group: adapters},
	{path: "internal/driver/kubernetes/pod", group: inside, also: []string{"internal/agent", "internal/driver/kubernetes/podapi"}},
	{path: "internal/blob/local", group: adapters, also: []string{"internal/artifact", "internal/dataset"}, guests: []string{"golang.org/x/sys"}},
	{path: "internal/blob/blobtest", group: adapters, also: []string{"internal/artifact", "internal/dataset"}},
	{path: "internal/sqlstore", group: adapters, also: []string{"internal/artifact", "internal/dataset", "internal/session"}, guests: []string{"modernc.org/sqlite", "github.com/jackc/pgx/v5"}},
	{path: "internal/sqlstore/pgtest", group: alone, guests: []string{"github.com/jackc/pgx/v5"}}, // a real Postgres for tests
	{path: "internal/sqlstore/storetest", group: adapters, also: []string{"internal/artifact", "internal/dataset", "internal/session"}, guests: []string{"github.com/google/go-cmp"}},
	{path: "internal/image", group: adapters, guests: []string{"github.com/google/go-containerregistry", "github.com/klauspost/compress", "golang.org/x/sys"}},
	{path: "internal/telemetry", group: adapters, also: []string{"internal/artifact", "internal/dataset", "internal/session"}, guests: []string{"go.opentelemetry.io/otel"}}, // nobody else knows OpenTelemetry
	{path: "internal/telemetry/otlptest", group: adapters,
		guests: []string{"go.opentelemetry.io/proto/otlp", "google.golang.org/grpc", "google.golang.org/protobuf"}},

	// edges: bring requests in; ignorant of adapters and of each other
	{path: "internal/gateway", group: edges},
	{path: "internal/fleet", group: edges}, // which of several servers answers
	{path: "internal/dialect/cove", group: edges, also: []string{"client", "internal/artifact", "internal/dataset", "internal/session", "internal/snippet", "internal/dialect/transfer"}},
	{path: "internal/dialect/e2b", group: edges, also: []string{"internal/dialect/e2b/target", "internal/dialect/e2b/build", "internal/dialect/transfer"}},
	{path: "internal/dialect/e2b/target", group: edges},
	{path: "internal/dialect/e2b/edge", group: edges, also: []string{"internal/dialect/e2b/target", "internal/dialect/rawport", "internal/dialect/transfer"}},
	{path: "internal/dialect/e2b/envd", group: edges, also: []string{"internal/dialect/e2b/target", "internal/dialect/e2b/envd/...", "internal/dialect/rpcbudget", "internal/dialect/transfer"},
		guests: []string{"connectrpc.com/connect", "google.golang.org/protobuf"}},
	{path: "internal/dialect/e2b/envd/envdpb", group: edges, guests: []string{"google.golang.org/protobuf"}},
	{path: "internal/dialect/e2b/envd/envdpb/envdpbconnect", group: edges, also: []string{"internal/dialect/e2b/envd/envdpb"},
		guests: []string{"connectrpc.com/connect"}},
	{path: "internal/dialect/e2b/interpreter", group: edges, also: []string{"internal/dialect/e2b/target", "internal/dialect/transfer"}},
	{path: "internal/dialect/e2b/build", group: edges, also: []string{"internal/dialect/e2b/target", "internal/dialect/transfer"}},
	{path: "internal/dialect/rawport", group: edges},  // ports of sandboxes, as every dialect that has them serves them
	{path: "internal/dialect/transfer", group: edges}, // bodies and files on their way, for every dialect
	{path: "internal/dialect/rpcbudget", group: edges, also: []string{"internal/dialect/transfer"},
		guests: []string{"connectrpc.com/connect", "google.golang.org/protobuf"}},
	{path: "internal/dialect/opensandbox", group: edges, also: []string{"internal/dialect/opensandbox/access", "internal/dialect/rawport", "internal/dialect/transfer"}},
	{path: "internal/dialect/opensandbox/access", group: edges},
	{path: "internal/dialect/opensandbox/execd", group: edges, also: []string{"internal/dialect/opensandbox/access", "internal/dialect/transfer"},
		guests: []string{"github.com/coder/websocket"}},
	{path: "internal/dialect/opensandbox/egress", group: edges, also: []string{"internal/dialect/opensandbox/access", "internal/dialect/transfer"}},
	{path: "internal/dialect/agentsandbox", group: edges, also: []string{"internal/dialect/agentsandbox/patch", "internal/dialect/agentsandbox/place", "internal/dialect/agentsandbox/tunnel", "internal/dialect/transfer"}},
	{path: "internal/dialect/agentsandbox/patch", group: edges}, // of JSON documents, whatever they hold
	{path: "internal/dialect/agentsandbox/router", group: edges, also: []string{"internal/dialect/agentsandbox/place", "internal/dialect/agentsandbox/tunnel", "internal/dialect/rawport", "internal/dialect/transfer"}},
	{path: "internal/dialect/agentsandbox/place", group: edges},
	{path: "internal/dialect/agentsandbox/runtime", group: edges, also: []string{"internal/dialect/agentsandbox/place", "internal/dialect/transfer"}},
	{path: "internal/dialect/agentsandbox/sandboxd", group: edges, also: []string{"internal/dialect/agentsandbox/place", "internal/dialect/agentsandbox/sandboxd/...", "internal/dialect/rpcbudget", "internal/dialect/transfer"},
		guests: []string{"connectrpc.com/connect"}},
	{path: "internal/dialect/agentsandbox/sandboxd/processpb", group: edges, guests: []string{"google.golang.org/protobuf"}},
	{path: "internal/dialect/agentsandbox/sandboxd/processpb/processpbconnect", group: edges, also: []string{"internal/dialect/agentsandbox/sandboxd/processpb"},
		guests: []string{"connectrpc.com/connect"}},
	{path: "internal/dialect/agentsandbox/tunnel", group: edges, guests: []string{"github.com/coder/websocket", "github.com/moby/spdystream"}},
	{path: "internal/cli", group: edges, also: []string{"client", "internal/app", "internal/config", "internal/cli/imagebuild"},
		guests: []string{"github.com/spf13/cobra", "golang.org/x/sys", "golang.org/x/term"}},
	{path: "internal/cli/dockerfile", group: alone},                                                      // reads Dockerfiles
	{path: "internal/cli/imagebuild", group: alone, also: []string{"client", "internal/cli/dockerfile"}}, // builds images through the public API alone

	// public: what others build on; standard library only
	{path: "client", group: public},

	// inside the sandbox
	{path: "internal/agent", group: inside},
	{path: "cmd/cove-agent", group: inside, also: []string{"internal/agent"}},
	{path: "cmd/cove-pod", group: inside, also: []string{"internal/driver/kubernetes/pod"}}, // the agent in a Pod: TLS besides
	{path: "kernel", group: inside},

	// wiring: the only place that knows every part
	{path: "internal/config", group: alone, guests: []string{"github.com/BurntSushi/toml"}},
	{path: "internal/connlimit", group: alone}, // how many connections a server has, and for how long
	{path: "internal/app", group: wiring, guests: []string{"golang.org/x/sys"}},
	{path: "cmd/cove", group: wiring},
	{path: "internal/archtest", group: alone},
	{path: "bench", group: alone, guests: []string{"golang.org/x/sys"}, // through the front door, and beside it to the driver
		also: []string{"client", "internal/agentapi", "internal/driver/native", "internal/policy", "internal/sandbox", "internal/template"}},
	{path: "bench/scale", group: alone, guests: []string{"k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go"}, // a large cluster whose nodes it plays
		also: []string{"internal/agentapi", "internal/driver/kubernetes", "internal/driver/kubernetes/podapi", "internal/sandbox"}},
	{path: "e2e/acceptance", group: alone}, // which test proves which promise
	{path: "e2e/cluster", group: alone},    // faults of a cluster, from outside
	{path: "e2e", group: alone},            // its tests use the built binary and the public client
	{path: "deploy", group: alone},         // charts and manifests, which its tests read
	{path: "deploy/image", group: alone, guests: []string{"github.com/google/go-containerregistry"}},
	{path: "test/cluster", group: alone}, // a real Kubernetes for tests, started and ended
	{path: "test/cluster/pause", group: alone},
	{path: "test/chaos", group: alone},   // faults of a running server; its tests use the built binary and the public client
	{path: "test/tenants", group: alone}, // two tenants of one server; its tests use the built binary and the public client
	{path: "test/slow", group: alone},    // which tests make test leaves out
	{path: "test/testserver", group: alone, guests: []string{"github.com/google/nftables"}, // real servers for tests, and what they hold on the host
		also: []string{"client", "internal/driver/native", "internal/template"}},
}

// agentLinks is what the agent's binary may contain, besides the standard library's own internals. It runs in every
// sandbox, so each package here is memory and start time, times the number of sandboxes.
var agentLinks = []string{
	"cmd/cove-agent", "internal/agent", "internal/agentapi", "internal/fault",

	"bufio", "bytes", "cmp", "context", "encoding", "encoding/base64", "encoding/binary", "encoding/json", "errors", "fmt",
	"io", "io/fs", "iter", "maps", "math", "math/bits", "math/rand/v2", "net", "net/netip", "os", "os/signal", "path",
	"reflect", "runtime", "runtime/debug", "slices", "strconv", "strings", "sync", "sync/atomic", "syscall",
	"time", "unicode", "unicode/utf16", "unicode/utf8", "unique", "unsafe", "weak",
}

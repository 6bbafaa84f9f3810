package place

// The ports of a sandbox for which the server answers.
const (
	PortRuntime   = 8888 // of the older runtime
	PortFiles     = 8080 // of the newer one, over HTTP
	PortProcesses = 9090 // of the newer one, over gRPC
)

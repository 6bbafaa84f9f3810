// Package envdpb is the wire format of envd's two services, generated from the .proto files beside it.
package envdpb

//go:generate sh generate.sh

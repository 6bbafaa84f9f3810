#!/bin/sh
# Makes the Go code of the service anew. Wants python3 with grpcio-tools 1.85.1 (pip install grpcio-tools==1.85.1), which brings protoc.
set -eu
cd "$(dirname "$0")"
module=github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd/processpb
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
GOBIN=$tools go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11
GOBIN=$tools go install connectrpc.com/connect/cmd/protoc-gen-connect-go@v1.21.1
PATH=$tools:$PATH python3 -m grpc_tools.protoc -I. \
	--go_out=. --go_opt=module=$module --connect-go_out=. --connect-go_opt=module=$module process.proto

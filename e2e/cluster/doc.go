// Package cluster holds tests of servers whose sandboxes are Pods of a real cluster: what users see when a node, a Pod, the API server or a
// server of Cove fails. `make test-cluster` starts the cluster and runs them; elsewhere they are skipped.
package cluster

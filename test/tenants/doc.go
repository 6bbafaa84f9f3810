// Package tenants holds a server with two tenants to one promise: no route of any dialect lets one tenant see, use or
// change what is the other's, or take the server's capacity from it. `make test-tenants` runs it.
package tenants

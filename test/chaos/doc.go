// Package chaos breaks running servers on purpose and holds them to what they promise then: what clients see, how long
// until service, what is lost and what is left over. `make test-chaos` runs it.
package chaos

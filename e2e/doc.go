// Package e2e holds Cove to its promises from outside: a real server as a child process, real sandboxes, the public
// client and nothing that a user would not have, besides what root can count on the host.
package e2e

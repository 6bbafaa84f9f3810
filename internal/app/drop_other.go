//go:build !linux

package app

// dropPrivilege has nothing to drop where no driver needs privilege.
func dropPrivilege() error { return nil }

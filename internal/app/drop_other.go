//go:build !linux

package app

import (
	"io/fs"
	"os"
)

type user struct{ uid, gid int }

func serverUser(string) user { return user{os.Getuid(), os.Getgid()} }

// dropPrivilege has nothing to drop where no driver needs privilege.
func (s *Server) dropPrivilege() error { return nil }

func readableHere(fs.FileInfo) bool { return true }

func laterUID(dataDir string) int { return serverUser(dataDir).uid }

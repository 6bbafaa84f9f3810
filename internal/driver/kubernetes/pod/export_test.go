package pod

import "io/fs"

// SeedTo is Seed in a process of another program.
func SeedTo(to string, left int64, dirs ...string) error {
	return (&seed{left: left, to: to}).all(dirs, to)
}

// SeedFile copies one file of so many bytes at most.
func SeedFile(left int64, from, to string, info fs.FileInfo) error {
	return (&seed{left: left}).file(from, to, info)
}

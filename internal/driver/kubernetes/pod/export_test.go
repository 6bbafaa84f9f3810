package pod

// SeedTo is Seed with volumes elsewhere.
func SeedTo(to string, left int64, dirs ...string) error {
	return (&seed{left: left, to: to}).all(dirs)
}

package sqlstore

import "time"

func init() { claimPatience = 500 * time.Millisecond }

// Dollars and WithoutNUL are for tests of what texts become.
var (
	Dollars    = dollars
	WithoutNUL = withoutNUL
)

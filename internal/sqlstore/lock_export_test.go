package sqlstore

// How long calls may take: the first while the database is in trouble, and later ones.
const (
	PostgresLimit = postgresLimit
	LockLimit     = lockLimit
	SuspectLimit  = suspectLimit
)

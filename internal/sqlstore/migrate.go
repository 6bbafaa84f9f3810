package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"os"

	"github.com/covehq/cove/internal/fault"
)

// migrations are files named by the schema version that they lead to, 0001 first. One that was released never changes.
//
//go:embed migrations/*.sql
var migrations embed.FS

// checkUpTo is the size up to which a database is read through when it opens.
const checkUpTo = 64 << 20

// check finds a damaged file before anything is built on it.
func check(db *sql.DB, path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() > checkUpTo {
		return nil
	}
	var verdict string
	if err := db.QueryRow("PRAGMA quick_check(1)").Scan(&verdict); err != nil {
		return err
	}
	if verdict != "ok" {
		return fault.New(fault.Invalid, "the database %s is damaged (%s): restore it from a backup, or move it away to start with an empty one", path, verdict)
	}
	return nil
}

// migrate runs every migration that the database has not seen, each in a transaction with its version.
func migrate(db *sql.DB, path string) error {
	files, err := fs.Glob(migrations, "migrations/*.sql") // sorted
	if err != nil {
		return err
	}
	var version int
	if err := db.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > len(files) {
		return fault.New(fault.Unsupported,
			"the database %s was written by a newer Cove: its schema is version %d and this server knows up to %d; run the newer server, or use another data directory",
			path, version, len(files))
	}
	for i := version; i < len(files); i++ {
		if err := step(db, files[i], i+1); err != nil {
			return fmt.Errorf("migrate to schema version %d: %w", i+1, err)
		}
	}
	return nil
}

func step(db *sql.DB, file string, version int) error {
	text, err := migrations.ReadFile(file)
	if err != nil {
		return err
	}
	s := &Store{w: db}
	// At start, before anybody can ask to stop: a half migration rolls back by itself.
	return s.inTx(context.Background(), func(tx *sql.Tx) error {
		if _, err := tx.Exec(string(text)); err != nil {
			return err
		}
		_, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version))
		return err
	})
}

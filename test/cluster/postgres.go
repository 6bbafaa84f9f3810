package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// postgres is a database in the cluster's network for servers that share one. It is started by name and not with the rest.
// Anybody on the link may enter: it is a test's.
func (c *cluster) postgres() part {
	script := `set -e
data=$1 bin=$2
cd /
mkdir -p "$data" && chown nobody "$data" && chmod 700 "$data"
if [ ! -f "$data/PG_VERSION" ]; then
	setpriv --reuid nobody --clear-groups "$bin/initdb" -D "$data" -U cove -A trust -E UTF8 --no-sync >/dev/null
	echo "host all all 0.0.0.0/0 trust" >> "$data/pg_hba.conf"
fi
exec setpriv --reuid nobody --clear-groups "$bin/postgres" -D "$data" -k "$data" -c listen_addresses='*' -c fsync=off -c max_connections=200`
	return part{
		name: "postgres", limit: time.Minute, args: []string{"sh", "-c", script, "postgres", postgresDir(), postgresBin()},
		ready: func(ctx context.Context) (bool, error) {
			if postgresBin() == "" {
				return false, errStop{errors.New("install Debian's package postgresql")}
			}
			_, err := tell(ctx, filepath.Join(postgresBin(), "pg_isready"), "-h", nodeAddress, "-U", "cove", "-d", "postgres")
			return err == nil, err
		},
	}
}

// postgresDir is outside the cluster's own directory, which is in a home that other users may not enter.
func postgresDir() string { return filepath.Join(os.TempDir(), namespace+"-postgres") }

// postgresBin is where Debian keeps the newest server's programs, which it does not put into PATH.
func postgresBin() string {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if len(found) > 0 {
		return filepath.Dir(slices.Max(found))
	}
	path, err := exec.LookPath("postgres")
	if err != nil {
		return ""
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "initdb")); err != nil {
		return ""
	}
	return filepath.Dir(path)
}

package sqlstore_test

import (
	"database/sql"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

// Both databases end with the same tables, columns and indexes, whatever each of them calls a type.
func TestBothDatabasesHaveOneSchema(t *testing.T) {
	file, dsn := filepath.Join(t.TempDir(), "cove.db"), pgtest.URL(t)
	open(t, file)
	openPostgres(t, dsn)
	lite, err := sql.Open("sqlite", file)
	if err != nil {
		t.Fatal(err)
	}
	defer lite.Close()
	for what, q := range map[string]struct{ sqlite, postgres string }{
		"columns": {
			`SELECT t.name || '.' || c.name || ' ' || CASE c.type WHEN 'INTEGER' THEN 'bigint' WHEN 'TEXT' THEN 'text' WHEN 'BLOB' THEN 'bytea' ELSE c.type END
				|| CASE WHEN c."notnull" OR c.pk THEN ' not null' ELSE '' END
				|| CASE WHEN c.dflt_value IS NULL THEN '' ELSE ' default ' || c.dflt_value END AS line
				FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'`,
			`SELECT table_name || '.' || column_name || ' ' || data_type || CASE is_nullable WHEN 'NO' THEN ' not null' ELSE '' END
				|| coalesce(' default ' || replace(replace(column_default, '::text', ''), '::bigint', ''), '') AS line
				FROM information_schema.columns WHERE table_schema = current_schema() AND table_name <> 'cove_schema'`,
		},
		"order of text": {
			`SELECT 'C' FROM (SELECT 1) WHERE 0`,
			`SELECT table_name || '.' || column_name FROM information_schema.columns WHERE table_schema = current_schema() AND data_type = 'text' AND collation_name IS DISTINCT FROM 'C'`,
		},
		"indexes": {
			`SELECT i.name || ' ' || i."unique" || ' ' || i.partial || ' ' ||
				(SELECT group_concat(c.name) FROM (SELECT name FROM pragma_index_info(i.name) ORDER BY seqno) c) AS line
				FROM sqlite_schema t, pragma_index_list(t.name) i WHERE t.type = 'table' AND i.origin = 'c'`,
			`SELECT c.relname || ' ' || i.indisunique::int || ' ' || (i.indpred IS NOT NULL)::int || ' ' ||
				(SELECT string_agg(a.attname, ',' ORDER BY k.n) FROM unnest(i.indkey::int[]) WITH ORDINALITY AS k(at, n)
					JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.at) AS line
				FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace s ON s.oid = c.relnamespace
				WHERE s.nspname = current_schema() AND NOT EXISTS (SELECT 1 FROM pg_constraint k WHERE k.conindid = c.oid)`,
		},
	} {
		if diff := cmp.Diff(lines(t, lite, q.sqlite), lines(t, raw(t, dsn), q.postgres)); diff != "" {
			t.Errorf("%s of SQLite and Postgres differ:\n%s", what, diff)
		}
	}
}

func lines(t *testing.T, db *sql.DB, query string) (all []string) {
	t.Helper()
	rows, err := db.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		all = append(all, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

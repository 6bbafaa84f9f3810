package sqlstore_test

import (
	"encoding/json"
	"testing"

	"github.com/covehq/cove/internal/sqlstore"
)

func TestArgumentsAreNumberedAsPostgresWritesThem(t *testing.T) {
	for query, want := range map[string]string{
		"SELECT 1":                         "SELECT 1",
		"a = ?1 AND b = ?12 AND a <> ?1":   "a = $1 AND b = $12 AND a <> $1",
		"a = ? AND b IN (?, ?) LIMIT ?":    "a = $1 AND b IN ($2, $3) LIMIT $4",
		"a = '?' AND b = 'it''s ?1' OR ?":  "a = '?' AND b = 'it''s ?1' OR $1",
		"(annotations::json ->> ?::text)":  "(annotations::json ->> $1::text)",
		"x = ''":                           "x = ''",
		"(?2 = '' OR tenant = ?2) AND ?1>": "($2 = '' OR tenant = $2) AND $1>",
	} {
		if got := sqlstore.Dollars(query); got != want {
			t.Errorf("%s becomes %s, want %s", query, got, want)
		}
	}
}

func TestANULBecomesACharacterThatEveryDatabaseKeeps(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "plain": "plain", "\x00": "\uFFFD", "a\x00\x00b": "a\uFFFD\uFFFDb",
		`\u0000`: `\u0000`, "\\\x00": "\\\uFFFD", `\\`: `\\`, `\\u0000` + "\x00": `\\u0000` + "\uFFFD",
	} {
		encoded, err := json.Marshal(map[string]string{"k": text})
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		if err := json.Unmarshal([]byte(sqlstore.WithoutNUL(string(encoded))), &got); err != nil || got["k"] != want {
			t.Errorf("%q becomes %q, %v", text, got["k"], err)
		}
	}
}

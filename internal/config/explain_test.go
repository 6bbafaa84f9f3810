package config_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/config"
)

func TestEachSettingSaysWhereItComesFrom(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cove.toml")
	if err := os.WriteFile(file, []byte("listen = '127.0.0.1:1'\ndata_dir = '/one'\n[sandbox]\nmemory = '1GiB'\n[template]\nprepare = ['a', 'b']\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := config.Explain(config.Source{
		File:  file,
		Env:   from(map[string]string{"COVE_DATA_DIR": "/two", "COVE_LOG_LEVEL": "debug"}),
		Flags: map[string]string{"data_dir": "/three"},
	})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]config.Setting{}
	for _, s := range got {
		all[s.Name] = s
	}
	for _, want := range []config.Setting{
		{"listen", "127.0.0.1:1", "file " + file},
		{"data_dir", "/three", "flag --data-dir"},
		{"log.level", "debug", "environment COVE_LOG_LEVEL"},
		{"log.format", "text", config.FromDefault},
		{"sandbox.memory", "1GiB", "file " + file},
		{"sandbox.disk", "", config.FromDefault},
		{"template.prepare", "a,b", "file " + file},
	} {
		if all[want.Name] != want {
			t.Errorf("%+v, want %+v", all[want.Name], want)
		}
	}
	if _, err := config.Explain(config.Source{File: "/no/such", Env: none}); err == nil {
		t.Error("a file that was named and is not there is no error")
	}
}

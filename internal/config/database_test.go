package config_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
)

func TestAPasswordIsNeverShown(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://cove:hunter2@db.example:5432/cove":             "postgres://cove:••••••••@db.example:5432/cove",
		"postgres://cove@db.example/cove":                          "postgres://cove@db.example/cove",
		"postgres:///cove?host=/run/pg&password=hunter2&user=cove": "postgres:///cove?••••••••",
		"postgres://cove:hunter2%2F@db.example/cove?sslpassword=p": "postgres://cove:••••••••@db.example/cove?••••••••",
		"postgres://[::1:hunter2":                                  "••••••••",
		"host=db.example password=hunter2":                         "••••••••",
		"postgres:cove:hunter2@db.example":                         "••••••••",
		"":                                                         "",
	} {
		c := config.Default()
		c.Database.URL = config.DatabaseURL(dsn)
		var log bytes.Buffer
		slog.New(slog.NewTextHandler(&log, nil)).Info("x", "url", c.Database.URL, "config", c.Database)
		text, err := json.Marshal(c.Database)
		if err != nil {
			t.Fatal(err)
		}
		for _, shown := range []string{c.String(), fmt.Sprintf("%v %+v %#v %s %q", c, c, c, c.Database.URL, c.Database.URL), log.String(), string(text)} {
			if strings.Contains(shown, "hunter2") {
				t.Errorf("%s is shown in %s", dsn, shown)
			}
		}
		if got := c.Database.URL.String(); got != want {
			t.Errorf("%s is shown as %s, want %s", dsn, got, want)
		}
	}
}

func TestWhereStateIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		env      map[string]string
		says     string
		postgres bool
	}{
		"in a file of its own":       {nil, "", false},
		"one server needs no more":   {map[string]string{"COVE_SERVER_REPLICAS": "1"}, "", false},
		"in Postgres":                {map[string]string{"COVE_DATABASE_URL": "postgres://u:p@h/d"}, "", true},
		"by a file":                  {map[string]string{"COVE_DATABASE_URL_FILE": "/run/secrets/db"}, "", true},
		"several servers":            {map[string]string{"COVE_DATABASE_URL": "postgresql://h/d", "COVE_SERVER_REPLICAS": "3", "COVE_DRIVER": "inproc"}, "", true},
		"several native servers":     {map[string]string{"COVE_DATABASE_URL": "postgresql://h/d", "COVE_SERVER_REPLICAS": "2"}, "server.replicas = 2 with driver = native: sandboxes live on the machine of their server", false},
		"one native server":          {map[string]string{"COVE_DATABASE_URL": "postgresql://h/d", "COVE_SERVER_REPLICAS": "1"}, "", true},
		"several with SQLite":        {map[string]string{"COVE_SERVER_REPLICAS": "2"}, "server.replicas = 2 needs Postgres: several servers cannot share a SQLite file", false},
		"fewer than none":            {map[string]string{"COVE_SERVER_REPLICAS": "-1"}, "negative", false},
		"two places":                 {map[string]string{"COVE_DATABASE_URL": "postgres://h/d", "COVE_DATABASE_URL_FILE": "/x"}, "say one of them", false},
		"another kind of database":   {map[string]string{"COVE_DATABASE_URL": "mysql://u:hunter2@h/d"}, "want postgres://", false},
		"what is no URL":             {map[string]string{"COVE_DATABASE_URL": "host=h password=hunter2"}, "want postgres://", false},
		"a URL with a bad character": {map[string]string{"COVE_DATABASE_URL": "postgres://u:hunter2%@h/d"}, "special characters", false},
		"a file somewhere":           {map[string]string{"COVE_DATABASE_URL_FILE": "db"}, "absolute", false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := config.Load(config.Source{Env: from(c.env)})
			if c.says == "" && (err != nil || got.Database.Postgres() != c.postgres) {
				t.Errorf("%v, %v", got.Database, err)
			}
			if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "hunter2")) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestAPasswordInAFileIsNotExplained(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cove.toml")
	if err := os.WriteFile(file, []byte("driver = 'inproc'\n[database]\nurl = 'postgres://cove:hunter2@h/d'\n[server]\nreplicas = 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := config.Explain(config.Source{File: file, Env: none})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Name == "database.url" && s != (config.Setting{Name: s.Name, Value: "postgres://cove:••••••••@h/d", From: "file " + file}) {
			t.Errorf("%+v", s)
		}
	}
}

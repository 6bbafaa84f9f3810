package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
)

func TestEveryExampleIsAConfiguration(t *testing.T) {
	for _, kind := range config.Examples() {
		text, err := config.Example(kind)
		if err != nil {
			t.Fatal(err)
		}
		for name, written := range map[string]string{kind: text, kind + " with every comment taken away": uncomment(text)} {
			t.Run(name, func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "cove.toml")
				if err := os.WriteFile(file, []byte(written), 0o600); err != nil {
					t.Fatal(err)
				}
				got, err := config.Load(config.Source{File: file, Env: none})
				if err != nil {
					t.Fatal(err)
				}
				if name == "native" && got.String() != config.Default().String() {
					t.Errorf("it is not the default:\n%s", got)
				}
			})
		}
	}
	if _, err := config.Example("vm"); err == nil || !strings.Contains(err.Error(), "docker, native, team") {
		t.Errorf("an unknown one: %v", err)
	}
}

// uncomment turns settings that are commented out into settings; sentences have a space behind their mark.
func uncomment(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if len(line) > 1 && line[0] == '#' && line[1] != ' ' {
			line = line[1:]
		}
		b.WriteString(line)
	}
	return b.String()
}

func TestWhoMayComeWithoutAKey(t *testing.T) {
	for name, c := range map[string]struct {
		env  map[string]string
		ok   bool
		open bool
	}{
		"nobody":                          {nil, true, false},
		"on this machine":                 {map[string]string{"COVE_AUTH_ANONYMOUS": "true"}, true, true},
		"by OpenSandbox's word":           {map[string]string{"OPENSANDBOX_INSECURE_SERVER": "YES"}, true, true},
		"our own word counts more":        {map[string]string{"OPENSANDBOX_INSECURE_SERVER": "YES", "COVE_AUTH_ANONYMOUS": "false"}, true, false},
		"another word of theirs is no":    {map[string]string{"OPENSANDBOX_INSECURE_SERVER": "1"}, true, false},
		"not beyond it":                   {map[string]string{"COVE_AUTH_ANONYMOUS": "true", "COVE_LISTEN": "0.0.0.0:8080"}, false, false},
		"not on every address by default": {map[string]string{"COVE_AUTH_ANONYMOUS": "true", "COVE_LISTEN": ":8080"}, false, false},
		"beyond it with a second word":    {map[string]string{"COVE_AUTH_ANONYMOUS": "true", "COVE_AUTH_ANONYMOUS_EVERYWHERE": "true", "COVE_LISTEN": "0.0.0.0:8080"}, true, true},
		"what is no answer":               {map[string]string{"COVE_AUTH_ANONYMOUS": "perhaps"}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := config.Load(config.Source{Env: from(c.env)})
			if (err == nil) != c.ok || err == nil && got.Auth.Anonymous != c.open {
				t.Errorf("%v, %v", got.Auth, err)
			}
		})
	}
}

func TestMapsAreReadFromTheEnvironment(t *testing.T) {
	env := map[string]string{"COVE_IMAGES_MAP": "node:*=base, python:3.12=", "COVE_IMAGES_MIRRORS": "docker.io=a:1,docker.io=b,ghcr.io=c"}
	got, err := config.Load(config.Source{Env: from(env)})
	if err != nil {
		t.Fatal(err)
	}
	if got.Images.Map["node:*"] != "base" || got.Images.Map["python:3.12"] != "" || got.Images.Map["python:3.11"] != "code-interpreter" {
		t.Errorf("the map is %v", got.Images.Map)
	}
	if m := got.Images.Mirrors; len(m["docker.io"]) != 2 || m["ghcr.io"][0] != "c" {
		t.Errorf("mirrors are %v", m)
	}
	all, err := config.Explain(config.Source{Env: from(env)})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Name == "images.mirrors" && s.Value != "docker.io=a:1,docker.io=b,ghcr.io=c" {
			t.Errorf("mirrors are shown as %q", s.Value)
		}
	}
	for _, bad := range []string{"x", "=y"} {
		if _, err := config.Load(config.Source{Env: from(map[string]string{"COVE_IMAGES_MAP": bad})}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

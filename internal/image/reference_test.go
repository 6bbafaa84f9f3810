package image_test

import (
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
)

func TestReferences(t *testing.T) {
	const digest = "@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	patterns := map[string]string{
		"python": "py", "python:3.*": "py3", "python:3.*-slim": "slim", "opensandbox/code-interpreter*": "ci", "ghcr.io/team/*": "team", "registry.example:5000/a:*": "a",
	}
	for text, want := range map[string]struct{ full, mapped string }{
		"python":                              {"docker.io/library/python:latest", "py"},
		"python:latest":                       {"docker.io/library/python:latest", "py"},
		"library/python":                      {"docker.io/library/python:latest", "py"},
		"docker.io/python":                    {"docker.io/library/python:latest", "py"},
		"index.docker.io/library/python":      {"docker.io/library/python:latest", "py"},
		"python:3.12":                         {"docker.io/library/python:3.12", "py3"},
		"python:3.12-slim":                    {"docker.io/library/python:3.12-slim", "slim"},
		"python:2.7":                          {"docker.io/library/python:2.7", ""},
		"python" + digest:                     {"docker.io/library/python" + digest, ""},
		"python:3.12" + digest:                {"docker.io/library/python" + digest, ""},
		"pythonic":                            {"docker.io/library/pythonic:latest", ""},
		"someone/python":                      {"docker.io/someone/python:latest", ""},
		"ghcr.io/python":                      {"ghcr.io/python:latest", ""},
		"opensandbox/code-interpreter:v1.0.2": {"docker.io/opensandbox/code-interpreter:v1.0.2", "ci"},
		"opensandbox/code-interpreter/x":      {"docker.io/opensandbox/code-interpreter/x:latest", ""},
		"ghcr.io/team/app:1":                  {"ghcr.io/team/app:1", "team"},
		"ghcr.io/team/a/b:1":                  {"ghcr.io/team/a/b:1", ""},
		"registry.example:5000/a:x":           {"registry.example:5000/a:x", "a"},
		"localhost:5000/x":                    {"localhost:5000/x:latest", ""},
		"[::1]:5000/x:y":                      {"[::1]:5000/x:y", ""},
	} {
		full, mapped, err := image.Complete(text, patterns)
		if err != nil || full != want.full || mapped != want.mapped {
			t.Errorf("%s is %q, %q, %v", text, full, mapped, err)
		}
	}
	for _, text := range []string{"", ":", "@", "A", "a:b:c", "a//b", "a/../b", "./a", "../a/b", "a/./b", "host:99999999/x", "a@md5:1", "x y", "x\n", "x@sha256:zz"} {
		if full, _, err := image.Complete(text, nil); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q is %q, %v", text, full, err)
		}
	}
	for _, bad := range []map[string]string{{"": "x"}, {"x": ""}} {
		if _, _, err := image.Complete("x", bad); !fault.Is(err, fault.Invalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func TestRegistries(t *testing.T) {
	for text, want := range map[string]string{
		"": "docker.io", "docker.io": "docker.io", "https://index.docker.io/v1/": "docker.io", "registry-1.docker.io": "docker.io",
		"ghcr.io": "ghcr.io", "https://ghcr.io/": "ghcr.io", "localhost:5000": "localhost:5000",
	} {
		if got, err := image.ParseRegistry(text); err != nil || got != want {
			t.Errorf("%q is %q, %v", text, got, err)
		}
	}
}

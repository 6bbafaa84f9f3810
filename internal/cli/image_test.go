package cli_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/cli"
)

func TestNamesOfImages(t *testing.T) {
	for full, want := range map[string]string{
		"docker.io/library/python:3.12": "python:3.12", "docker.io/grafana/grafana:1": "grafana/grafana:1", "ghcr.io/a/b:c": "ghcr.io/a/b:c", "": "",
	} {
		if got := cli.Familiar(full); got != want {
			t.Errorf("%s is %s, want %s", full, got, want)
		}
	}
	for dir, want := range map[string]string{"/x/My App": "my-app", "/x/.hidden": "hidden", "/x/a_b.c": "a_b.c"} {
		if got, err := cli.NameOf(dir); got != want || err != nil {
			t.Errorf("%s is %s, %v", dir, got, err)
		}
	}
	if got, want := cli.Quoted([]string{"sh", "-c", "echo it's $X", ""}), `sh -c 'echo it'\''s $X' ''`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestMounts(t *testing.T) {
	for text, want := range map[string]client.Mount{
		"data:/data":         {Kind: "volume", Source: "data", Target: "/data", Create: true},
		"data/a/b:/data:ro":  {Kind: "volume", Source: "data", SubPath: "a/b", Target: "/data", Create: true, ReadOnly: true},
		"/srv/data:/data":    {Kind: "host", Source: "/srv/data", Target: "/data", ReadOnly: true},
		"/srv/data:/data:rw": {Kind: "host", Source: "/srv/data", Target: "/data"},
	} {
		got, err := cli.Mounts([]string{text})
		if diff := cmp.Diff([]client.Mount{want}, got); err != nil || diff != "" {
			t.Errorf("%s: %v %s", text, err, diff)
		}
	}
	for _, text := range []string{"", "a", "a:b", ":/x", "a:/x:", "a:/x:y", "a:/b:ro:z"} {
		if got, err := cli.Mounts([]string{text}); err == nil {
			t.Errorf("%q is %+v", text, got)
		}
	}
}

func TestHowFarAPullIs(t *testing.T) {
	events := []client.PullEvent{
		{Step: "resolve"},
		{Step: "download", Layer: "sha256:aaaaaaaaaaaaaaaa", Done: 1 << 20, Total: 4 << 20},
		{Step: "known", Layer: "sha256:bbbbbbbbbbbbbbbb"},
		{Step: "done", Layer: "sha256:cccccccccccccccc", Done: 5 << 20, Total: 5 << 20},
		{Step: "unpack", Layer: "sha256:dddddddddddddddd"},
	}
	want := []string{
		"x: 2 layers done, 2 on their way (0s)",
		"aaaaaaaaaaaa  downloading   [#####...............] 1MiB of 4MiB",
		"bbbbbbbbbbbb  here already",
		"cccccccccccc  done          5MiB",
		"dddddddddddd  unpacking",
	}
	t.Setenv("NO_COLOR", "1")
	if diff := cmp.Diff(want, cli.PullLines("x", 80, events...)); diff != "" {
		t.Error(diff)
	}
	if got := cli.PullLines("x", 80, events[0]); !cmp.Equal(got, []string{"x: asking the registry (0s)"}) {
		t.Errorf("%q", got)
	}
	for _, line := range cli.PullLines("a rather long name of an image", 20, events...) {
		if len([]rune(line)) > 20 {
			t.Errorf("%q is too wide", line)
		}
	}
	if got := cli.PlainPull("x", events[1]); got != "x: layer aaaaaaaaaaaa: downloading, 4MiB" {
		t.Error(got)
	}
}

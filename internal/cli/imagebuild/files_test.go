package imagebuild_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/cli/imagebuild"
)

func TestDockerignore(t *testing.T) {
	files := []string{"a.go", "b.md", "README.md", "sub/a.go", "sub/deep/x.md", ".git/config", "node_modules/x/y.js", "sub/node_modules/z.js", "tmp1", "tmpx"}
	for name, tc := range map[string]struct {
		text string
		want []string
	}{
		"nothing":               {"", nil},
		"comments":              {"# a.go\n\n  \n", nil},
		"a name":                {"a.go\n", []string{"a.go"}},
		"a slash in front":      {"/a.go", []string{"a.go"}},
		"a directory":           {".git\n", []string{".git/config"}},
		"a slash at the end":    {"sub/", []string{"sub/a.go", "sub/deep/x.md", "sub/node_modules/z.js"}},
		"stars stop":            {"*.md", []string{"b.md", "README.md"}},
		"one level":             {"*/a.go", []string{"sub/a.go"}},
		"any level":             {"**/*.md", []string{"b.md", "README.md", "sub/deep/x.md"}},
		"any node_modules":      {"**/node_modules", []string{"node_modules/x/y.js", "sub/node_modules/z.js"}},
		"but not":               {"*.md\n!README.md", []string{"b.md"}},
		"the last decides":      {"!README.md\n*.md", []string{"b.md", "README.md"}},
		"everything but":        {"*\n!sub/a.go", []string{"a.go", "b.md", "README.md", "sub/deep/x.md", ".git/config", "node_modules/x/y.js", "sub/node_modules/z.js", "tmp1", "tmpx"}},
		"a question mark":       {"tmp?", []string{"tmp1", "tmpx"}},
		"a set":                 {"tmp[0-9]", []string{"tmp1"}},
		"a dot is only a dot":   {"a?go\n!a.go", nil},
		"the root is not meant": {".\n/\n", nil},
	} {
		got, err := imagebuild.Excluded(tc.text, files...)
		if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
	for _, text := range []string{"a[", "x\\"} {
		if _, err := imagebuild.Excluded("ok\n"+text, files...); err == nil || !strings.Contains(err.Error(), ":2:") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzDockerignore(f *testing.F) {
	f.Add("**/[a-z]*\n!x/?", "a/b")
	f.Fuzz(func(t *testing.T, text, file string) { _, _ = imagebuild.ParseIgnore(text, file) })
}

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if target, ok := strings.CutPrefix(text, "-> "); ok {
			if err := os.Symlink(target, file); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatIsCopied(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"a.txt": "a", "b.txt": "b", "src/main.go": "m", "src/deep/x.txt": "x", "src/link": "-> main.go", "here": "-> src/main.go",
		"out": "-> /etc/passwd", "src/out": "-> ../../../etc/passwd", "secret.pem": "s", "logs/keep.log": "k", "logs/drop.log": "d",
		"pub": "-> keys", "keys/id": "i", "src/deep/up": "-> ../../keys", "key.txt": "-> keys/id", "old": "-> logs", "round": "-> round", "deep": "-> src/deep",
		".dockerignore": "*.pem\nlogs\n!logs/keep.log\nkeys\n",
	})
	for name, tc := range map[string]struct {
		sources []string
		want    []string
	}{
		"a file":                      {[]string{"a.txt"}, []string{"f a.txt"}},
		"a pattern":                   {[]string{"[ab].txt"}, []string{"f a.txt", "f b.txt"}},
		"what is in a directory":      {[]string{"src"}, []string{"d .", "d deep", "l deep/up -> ../../keys", "f deep/x.txt", "l link -> main.go", "f main.go", "l out -> ../../../etc/passwd"}},
		"a pattern in the middle":     {[]string{"s*/deep/x.txt"}, []string{"f x.txt"}},
		"a link is what it leads to":  {[]string{"here"}, []string{"f here"}},
		"paths stay in the directory": {[]string{"../../a.txt"}, []string{"f a.txt"}},
		"a link to a directory":       {[]string{"deep"}, []string{"d .", "l up -> ../../keys", "f x.txt"}},
		"below a link":                {[]string{"deep/x.txt", "d*p/x.txt"}, []string{"f x.txt", "f x.txt"}},
		"taken back by a link":        {[]string{"old"}, []string{"d .", "f keep.log"}},
		"a link to what is left out":  {[]string{"pub", "deep/up"}, []string{"d .", "d ."}}, // as such a directory itself, while patterns with ! may want a part of it
		"what was taken back":         {[]string{"logs"}, []string{"d .", "f keep.log"}},
	} {
		got, err := imagebuild.Copied(t.Context(), dir, tc.sources...)
		if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
	for source, says := range map[string]string{
		"none": "there is no none in", "*.none": "nothing is like", "secret.pem": "left out by .dockerignore", "out": "escapes", "src/../../x": "there is no x",
		"pub/id": "left out by .dockerignore", "pub/*": "nothing is like", "key.txt": "left out by .dockerignore",
		"src/deep/up/id": "left out by .dockerignore", "old/drop.log": "left out by .dockerignore", "round": "more than 40 links",
	} {
		if got, err := imagebuild.Copied(t.Context(), dir, source); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v", source, got, err)
		}
	}
}

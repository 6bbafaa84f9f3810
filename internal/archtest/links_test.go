package archtest_test

import (
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

var (
	inlineLink    = regexp.MustCompile(`\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)`)
	referenceLink = regexp.MustCompile(`(?m)^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?\s*$`)
	fence         = regexp.MustCompile("(?ms)^ {0,3}```.*?^ {0,3}```[ \t]*$")
	codeSpan      = regexp.MustCompile("`[^`\n]*`")
	heading       = regexp.MustCompile(`(?m)^#{1,6}\s+(.+?)\s*#*\s*$`)
	linkText      = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

func TestLinksBetweenDocumentsResolve(t *testing.T) {
	err := walk(".md", func(name string) error {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for _, target := range targets(string(text)) {
			if why := broken(t, name, target); why != "" {
				t.Errorf("%s links to %s: %s", strings.TrimPrefix(name, root+"/"), target, why)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// targets are the places that a document links to; code is no link.
func targets(text string) []string {
	text = codeSpan.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
	var found []string
	for _, pattern := range []*regexp.Regexp{inlineLink, referenceLink} {
		for _, match := range pattern.FindAllStringSubmatch(text, -1) {
			found = append(found, match[1])
		}
	}
	return found
}

// broken says why a link of a document leads nowhere; empty when it is fine, or not ours to judge.
func broken(t *testing.T, document, target string) string {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		return err.Error()
	}
	if u.Scheme != "" || u.Host != "" {
		return ""
	}
	name := document
	if u.Path != "" {
		if strings.HasPrefix(u.Path, "/") {
			return "an absolute path means another place on every reader's machine; write it relative to this file"
		}
		name = filepath.Join(filepath.Dir(document), filepath.FromSlash(u.Path))
	}
	if outside, err := filepath.Rel(root, name); err != nil || outside == ".." || strings.HasPrefix(outside, ".."+string(filepath.Separator)) {
		return "it leaves the repository"
	}
	if _, err := os.Stat(name); err != nil {
		return "there is no such file"
	}
	if u.Fragment == "" || !strings.HasSuffix(name, ".md") {
		return ""
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(anchors(string(text)), u.Fragment) {
		return "there is no such heading"
	}
	return ""
}

// anchors are the names that a forge gives to the headings of a document.
func anchors(text string) []string {
	var names []string
	for _, match := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		title := strings.ToLower(linkText.ReplaceAllString(match[1], "$1"))
		names = append(names, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return r
			}
			return -1
		}, title))
	}
	return names
}

func TestLinkChecker(t *testing.T) {
	const text = "# What is it?\n\nSee [a](a.md), [b](<b.md>) and [c](c.md#x \"title\").\n\n[d]: d.md\n\n```\n[no](no.md)\n# no\n```\n`[no](no.md)`\n"
	if got, want := targets(text), []string{"a.md", "b.md", "c.md#x", "d.md"}; !slices.Equal(got, want) {
		t.Errorf("targets are %q, want %q", got, want)
	}
	if got, want := anchors(text), []string{"what-is-it"}; !slices.Equal(got, want) {
		t.Errorf("anchors are %q, want %q", got, want)
	}
	for target, good := range map[string]bool{
		"doc.go": true, "../archtest": true, "https://example.com/x": true, "gone.md": false, "/etc/passwd": false, "../../../x": false,
	} {
		if why := broken(t, filepath.Join(root, "internal", "archtest", "x.md"), target); (why == "") != good {
			t.Errorf("link to %s: %q", target, why)
		}
	}
}

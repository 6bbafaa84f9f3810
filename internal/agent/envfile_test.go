package agent

import (
	"maps"
	"strings"
	"testing"
)

func TestFilesOfVariables(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want map[string]string
	}{
		"nothing":                             {"", nil},
		"plain ones":                          {"A=1\nB=two words \n", map[string]string{"A": "1", "B": "two words"}},
		"no end of line":                      {"A=1", map[string]string{"A": "1"}},
		"lines of Windows":                    {"A=1\r\nB=2\r\n", map[string]string{"A": "1", "B": "2"}},
		"the last one counts":                 {"A=1\nA=2\n", map[string]string{"A": "2"}},
		"comments and other lines":            {"# A=1\n\nnonsense\n9A=1\nB=2\n", map[string]string{"B": "2"}},
		"as a shell exports them":             {"export A=1\n", map[string]string{"A": "1"}},
		"single quotes keep everything":       {"A='a \"b\" $C \\n'\nB=1\n", map[string]string{"A": `a "b" $C \n`, "B": "1"}},
		"single quotes go over lines":         {"A='one\ntwo=2\n'\nB=1\n", map[string]string{"A": "one\ntwo=2\n", "B": "1"}},
		"double quotes know escapes":          {`A="it's \"x\" \\ \n\t\r$"` + "\nB=1", map[string]string{"A": "it's \"x\" \\ \n\t\r$", "B": "1"}},
		"quotes that never end":               {"A='one\nB=2\n", map[string]string{"B": "2"}},
		"double quotes that never end":        {"A=\"one\\\nB=2\n", map[string]string{"B": "2"}},
		"an equals sign in a value":           {"A=b=c\n", map[string]string{"A": "b=c"}},
		"an empty value":                      {"A=\nB=''\n", map[string]string{"A": "", "B": ""}},
		"what no process can have as a value": {"A=a\x00b\nB=2\n", map[string]string{"B": "2"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := parseEnv(c.text); !maps.Equal(got, c.want) {
				t.Fatalf("%q: got %q, want %q", c.text, got, c.want)
			}
		})
	}
}

func FuzzParseEnv(f *testing.F) {
	for _, seed := range []string{"", "A=1", "A='x\n'y\nB=\"\\", "export A=1\n=\n'"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for name, value := range parseEnv(text) {
			if !shellName(name) || strings.Contains(value, "\x00") {
				t.Fatalf("%q=%q can be no variable", name, value)
			}
		}
	})
}

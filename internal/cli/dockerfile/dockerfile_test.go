package dockerfile_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/cli/dockerfile"
)

// told is a file as one line for each instruction.
func told(f *dockerfile.File) (lines []string) {
	say := func(i dockerfile.Instruction) {
		line := i.Name + " " + strings.Join(i.Words, "|")
		if i.Exec {
			line += " (list)"
		}
		for _, d := range i.Docs {
			line += " <<" + d.Name + "=" + d.Text
		}
		for k, v := range i.Flags {
			line += " --" + k + "=" + v
		}
		lines = append(lines, line)
	}
	for _, a := range f.Args {
		say(a)
	}
	for _, s := range f.Stages {
		say(s.From)
		if s.Name != "" {
			lines = append(lines, "AS "+s.Name)
		}
		for _, i := range s.Steps {
			say(i)
		}
	}
	return lines
}

func TestParse(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want []string
	}{
		"the usual": {
			"# syntax=docker/dockerfile:1\nFROM python:3.12-slim\nWORKDIR /app\nCOPY requirements.txt .\nRUN pip install -r requirements.txt\nCOPY . .\nENV A=1 B=\"two words\"\nUSER app\nEXPOSE 80 443/udp\nCMD [\"python\", \"app.py\"]\n",
			[]string{"FROM python:3.12-slim", "WORKDIR /app", "COPY requirements.txt|.", "RUN pip|install|-r|requirements.txt", "COPY .|.", `ENV A=1|B="two words"`, "USER app", "EXPOSE 80|443/udp", "CMD python|app.py (list)"},
		},
		"lines that go on, with comments and empty lines between": {
			"FROM a\nRUN one && \\\n  # why\n\n  two \\  \n  three\n", []string{"FROM a", "RUN one|&&|two|three"},
		},
		"another escape":          {"# escape=`\nFROM a\nRUN dir c:\\ && `\n  x\n", []string{"FROM a", `RUN dir|c:\|&&|x`}},
		"lower case and CRLF":     {"from a as Build\r\nrun x\r\n", []string{"FROM a", "AS build", "RUN x"}},
		"a byte order mark":       {"\ufeffFROM a\n", []string{"FROM a"}},
		"arguments before FROM":   {"ARG V=1\nFROM a:$V\nARG V\n", []string{"ARG V=1", "FROM a:$V", "ARG V"}},
		"flags":                   {"FROM a\nCOPY --chown=app:app --chmod=755 x /y/\n", nil},
		"a heredoc":               {"FROM a\nRUN <<EOF\none\n# two\nEOF\nUSER x\n", []string{"FROM a", "RUN <<EOF <<EOF=one\n# two\n", "USER x"}},
		"a heredoc without tabs":  {"FROM a\nRUN <<-'EOF'\n\tone\n\tEOF\n", []string{"FROM a", "RUN <<-'EOF' <<EOF=one\n"}},
		"a file that stands here": {"FROM a\nCOPY <<X /x\nhi\nX\n", []string{"FROM a", "COPY <<X|/x <<X=hi\n"}},
		"no list is a command":    {"FROM a\nCMD [ -f x ] && y\n", []string{"FROM a", "CMD [|-f|x|]|&&|y"}},
		"the last line goes on":   {"FROM a\nRUN x \\", []string{"FROM a", "RUN x"}},
		"quotes are a shell's":    {"FROM a\nRUN echo it's\n", []string{"FROM a", "RUN "}},
		"two stages":              {"FROM a AS b\nRUN x\nFROM scratch\nCOPY --from=b /x /x\n", []string{"FROM a", "AS b", "RUN x", "FROM scratch", "COPY /x|/x --from=b"}},
		"what can be left out":    {"FROM a\nVOLUME /data\nHEALTHCHECK --interval=1s CMD x\nSTOPSIGNAL 9\nMAINTAINER me\n", []string{"FROM a"}},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := dockerfile.Parse("Dockerfile", []byte(tc.text))
			if err != nil {
				t.Fatal(err)
			}
			if tc.want == nil {
				return
			}
			if diff := cmp.Diff(tc.want, told(f)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWhatIsWrongIsToldWithItsLine(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"nothing":                {"", "D:1: there is no FROM"},
		"only comments":          {"# a\n\n", "there is no FROM"},
		"an unknown instruction": {"FROM a\n\nFETCH x\n", `D:3: unknown instruction "FETCH"`},
		"before FROM":            {"RUN x\nFROM a\n", "D:1: RUN stands before the first FROM"},
		"FROM nothing":           {"FROM\n", "D:1: write FROM IMAGE"},
		"FROM too much":          {"FROM a b\n", "write FROM IMAGE"},
		"two stages, one name":   {"FROM a AS x\nFROM a AS X\n", "D:2: there are two stages"},
		"a bad stage name":       {"FROM a AS 1x\n", "not a name for a stage"},
		"RUN nothing":            {"FROM a\nRUN\n", "D:2: write RUN"},
		"RUN of an empty list":   {"FROM a\nRUN []\n", "D:2: RUN [] runs nothing"},
		"a mount of a secret":    {"FROM a\nRUN --mount=type=secret,id=x cat\n", "D:2: RUN --mount="},
		"a second mount":         {"FROM a\nRUN --mount=type=cache,target=/c --mount=type=bind,target=/b x\n", "type=bind"},
		"an unknown flag":        {"FROM a\nCOPY --owner=x a b\n", "D:2: COPY knows no --owner"},
		"COPY to nowhere":        {"FROM a\nCOPY x\n", "D:2: write COPY"},
		"a bad mode":             {"FROM a\nCOPY --chmod=u+x a b\n", "octal digits"},
		"ADD of a URL":           {"FROM a\nADD https://example.com/x /x\n", "D:2: ADD cannot fetch"},
		"ENV without a value":    {"FROM a\nENV A\n", "write ENV NAME=VALUE"},
		"ENV with a bare word":   {"FROM a\nENV A=1 B\n", "write NAME=VALUE"},
		"an open quote":          {"FROM a\nENV A=\"x\n", "D:2: a quote is not closed"},
		"SHELL without a list":   {"FROM a\nSHELL /bin/bash\n", "D:2: write SHELL as a JSON list"},
		"an endless heredoc":     {"FROM a\nRUN <<E\nx\n", "D:2: the text that begins with <<E does not end"},
		"ONBUILD":                {"FROM a\nONBUILD RUN x\n", "D:2: ONBUILD is not supported"},
		"a bad argument":         {"ARG 1=2\nFROM a\n", "D:1: "},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := dockerfile.Parse("D", []byte(tc.text))
			var where *dockerfile.Error
			if !errors.As(err, &where) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want %q", err, tc.want)
			}
		})
	}
}

func TestExpand(t *testing.T) {
	known := map[string]string{"A": "1", "EMPTY": "", "PATH": "/bin"}
	look := func(name string) (string, bool) { v, ok := known[name]; return v, ok }
	f := &dockerfile.File{Escape: '\\'}
	for word, want := range map[string]string{
		"x": "x", "$A": "1", "${A}b": "1b", "$Ab": "", "$A-$A": "1-1", "/x:$PATH": "/x:/bin",
		`\$A`: "$A", `'$A'`: "$A", `"$A"`: "1", `"a b"`: "a b", `"\$A"`: "$A", `"a\"b"`: `a"b`, `"a\nb"`: `a\nb`, `a\ b`: "a b",
		"${N:-d}": "d", "${N-d}": "d", "${EMPTY:-d}": "d", "${EMPTY-d}": "", "${A:+y}": "y", "${A+y}": "y", "${N:+y}": "",
		"${EMPTY:+y}": "", "${EMPTY+y}": "y", "${N:-${A}}": "1", "${N:-${M:-x}}y": "xy", "$": "$", "a$": "a$", "$1": "$1", "": "",
	} {
		got, err := f.Expand(word, look)
		if err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", word, got, err, want)
		}
	}
	for _, word := range []string{"${", "${A", "${}", "${A:x}", "${N:?is needed}", `"x`, "'", "${N:-x"} {
		if got, err := f.Expand(word, look); err == nil {
			t.Errorf("%s is %q", word, got)
		}
	}
	if got, err := f.ExpandText("it's $A \\$A \"q\" \\n\n", look); err != nil || got != "it's 1 $A \"q\" \\n\n" {
		t.Errorf("%q, %v", got, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"FROM a\nRUN x", "# escape=`\nFROM a\nRUN `\nx", "FROM a\nRUN <<E\nE\n", "FROM a\nENV A=\"${B:-c}\" D\\ =e\n", "ARG A\nFROM $A AS b\nCOPY --from=b [\"x\", \"y\"]\n",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		file, err := dockerfile.Parse("D", []byte(text))
		var where *dockerfile.Error
		if err != nil && (!errors.As(err, &where) || where.Line < 1) {
			t.Fatalf("an error without a place: %v", err)
		}
		if err != nil {
			return
		}
		known := func(string) (string, bool) { return "v", true }
		for _, s := range file.Stages {
			for i := range s.Steps {
				switch s.Steps[i].Name {
				case "ENV", "LABEL", "ARG":
					_, _ = file.Pairs(&s.Steps[i], known)
				}
				for _, w := range s.Steps[i].Words {
					_, _ = file.Expand(w, known)
				}
			}
		}
	})
}

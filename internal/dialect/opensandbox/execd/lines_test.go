package execd_test

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
)

func TestLines(t *testing.T) {
	for name, c := range map[string]struct {
		chunks []string
		want   []string
	}{
		"nothing":                                {nil, nil},
		"a line":                                 {[]string{"a\n"}, []string{"a"}},
		"no end":                                 {[]string{"a"}, []string{"a"}},
		"a line in pieces":                       {[]string{"a", "b\nc", "d\n"}, []string{"ab", "cd"}},
		"a blank line":                           {[]string{"\na\n\n"}, []string{"\n", "a", "\n"}},
		"lines of Windows":                       {[]string{"a\r\nb\r\n"}, []string{"a", "b"}},
		"an end in two pieces":                   {[]string{"a\r", "\nb"}, []string{"a", "b"}},
		"a blank line of Windows":                {[]string{"\r\n\r\n"}, []string{"\n", "\n"}},
		"a blank line of Windows in two pieces":  {[]string{"\r", "\n\r", "\nx"}, []string{"\n", "\n", "x"}},
		"a progress bar":                         {[]string{"10%\r20%\r", "\r100%\n"}, []string{"10%", "20%", "100%"}},
		"a character in two pieces is one again": {[]string{"\xc3", "\xa9\n"}, []string{"é"}},
	} {
		t.Run(name, func(t *testing.T) {
			var chunks [][]byte
			for _, text := range c.chunks {
				chunks = append(chunks, []byte(text))
			}
			if raw := strings.Join(execd.Lines(true, chunks...), ""); raw != strings.Join(c.chunks, "") {
				t.Fatalf("together with their ends they are %q", raw)
			}
			if got := execd.Lines(false, chunks...); !slices.Equal(got, c.want) {
				t.Fatalf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestALineThatIsTooLongComesInPieces(t *testing.T) {
	long := strings.Repeat("é", execd.MaxLine)
	got := execd.Lines(false, []byte("x"+long[:1001]), []byte(long[1001:]+"\nend\n"))
	for _, piece := range got {
		if len(piece) > execd.MaxLine || !utf8.ValidString(piece) {
			t.Fatalf("a piece has %d bytes, valid: %v", len(piece), utf8.ValidString(piece))
		}
	}
	if strings.Join(got, "") != "x"+long+"end" || got[len(got)-1] != "end" {
		t.Fatal("bytes were lost")
	}
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("a\r\n\nb"), 2)
	f.Add([]byte("\r\r\n\xc3\xa9"), 1)
	f.Fuzz(func(t *testing.T, data []byte, at int) {
		whole := execd.Lines(false, data)
		if at < 0 || at > len(data) {
			return
		}
		if parts := execd.Lines(false, data[:at], data[at:]); !slices.Equal(whole, parts) {
			t.Fatalf("%q cut at %d: %q, whole: %q", data, at, parts, whole)
		}
		if raw := strings.Join(execd.Lines(true, data[:at], data[at:]), ""); raw != string(data) {
			t.Fatalf("%q became %q", data, raw)
		}
		clean := strings.NewReplacer("\n", "", "\r", "")
		if got := clean.Replace(strings.Join(whole, "")); got != clean.Replace(string(data)) {
			t.Fatalf("%q became %q", data, whole)
		}
	})
}

func TestJournal(t *testing.T) {
	shelves := execd.NewShelves()
	j := execd.NewJournal(shelves, "acme")
	j.Write([]byte("ab\xc3"))
	if text, next := j.Read(0, true); text != "ab" || next != 2 {
		t.Fatalf("while more may come: %q, %d", text, next)
	}
	j.Write([]byte("\xa9c"))
	if text, next := j.Read(2, true); text != "éc" || next != 5 {
		t.Fatalf("%q, %d", text, next)
	}
	if text, next := j.Read(99, false); text != "" || next != 5 {
		t.Fatalf("beyond the end: %q, %d", text, next)
	}
	for range 5 {
		j.Write(make([]byte, execd.MaxJournal/4))
	}
	text, next := j.Read(0, false)
	if !strings.HasPrefix(text, "[") || !strings.Contains(text[:80], "bytes of earlier output are not kept]\n") || next != 5+5*execd.MaxJournal/4 {
		t.Fatalf("%q, %d", text[:80], next)
	}
	if took := shelves.Taken(); took > execd.MaxJournal {
		t.Fatalf("it takes %d", took)
	}
	j.Drop()
	if shelves.Taken() != 0 {
		t.Fatal("it has not given everything back")
	}
}

func TestATenantsJournalsLeaveRoomForOthers(t *testing.T) {
	shelves := execd.NewShelves()
	kept := func(tenant string) int {
		j := execd.NewJournal(shelves, tenant)
		j.Write(make([]byte, execd.MaxJournal))
		text, _ := j.Read(0, false)
		return len(text)
	}
	for range execd.MaxTenant / execd.MaxJournal {
		kept("acme")
	}
	if n := kept("acme"); n > 2*execd.MinJournal {
		t.Errorf("a tenant who has too much already has %d more", n)
	}
	if n := kept("globex"); n != execd.MaxJournal {
		t.Errorf("another has %d", n)
	}
}

func TestPatterns(t *testing.T) {
	for text, want := range map[string][]string{
		"":                            {"*"},
		"**":                          {"*"},
		"*.py":                        {"*.py"},
		"**/*.py":                     {"*.py"},
		"a{b,c{d,e}}f?":               {"abf?", "acdf?", "acef?"},
		"[!a]*":                       {"[^a]*"},
		"{,x}y":                       {"y", "xy"},
		"{a":                          nil,
		"[a":                          nil,
		"{a,[}":                       nil,
		strings.Repeat("{a,b}", 9):    nil,
		strings.Repeat("x", 2000):     nil,
		strings.Repeat("{a,b}", 8):    {},
		strings.Repeat("{", 40) + "}": nil,
	} {
		got, err := execd.Patterns(text)
		switch {
		case want == nil && err == nil:
			t.Errorf("%.40q is taken: %q", text, got)
		case want != nil && err != nil:
			t.Errorf("%.40q: %v", text, err)
		case len(want) > 0 && !slices.Equal(got, want):
			t.Errorf("%.40q: got %q, want %q", text, got, want)
		}
	}
}

func FuzzPatterns(f *testing.F) {
	for _, seed := range []string{"*", "{a,b}", "{{", "[!a]", "a{b,{c,d}}"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := execd.Patterns(text)
		if err == nil && (len(list) == 0 || len(list) > 256) {
			t.Fatalf("%q: %d patterns", text, len(list))
		}
	})
}

func FuzzMetadata(f *testing.F) {
	for _, seed := range []string{`{"path":"/a","mode":644}`, `{"path":"","owner":null}`, `[]`, `{"path":"/a","mode":-1}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := execd.DecodeMetadata(raw)
		if err == nil && (m.Path == "" || strings.ContainsRune(m.Path, 0)) {
			t.Fatalf("%q is taken", raw)
		}
	})
}

func TestWhoTakesLinesWithTheirEnds(t *testing.T) {
	for agent, want := range map[string]bool{
		"": false, "OpenSandbox-Python-SDK/0.1.10": false, "OpenSandbox-JS-SDK/0.1.11": false, "python-httpx/0.28.1": false,
		"OpenSandbox-Python-SDK/1.1.1": true, "opensandbox-cli/1.1.1": true, "OpenSandbox-Go-SDK/12.0": true, "curl/8.0": false,
	} {
		if got := execd.KeepsEnds(agent); got != want {
			t.Errorf("%q: %v", agent, got)
		}
	}
}

func TestLinesWithTheirEnds(t *testing.T) {
	got := execd.Lines(true, []byte("a\r\n\nb\rc"))
	if want := []string{"a\r\n", "\n", "b\r", "c"}; !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}
}

package dockerfile

import (
	"encoding/json"
	"regexp"
	"strings"
)

// scanner gives the lines of a file, those that continue each other joined.
type scanner struct {
	file   string
	lines  []string
	at     int // how many lines have been read
	escape byte
}

// logical is a line with those that continue it.
type logical struct {
	number int
	text   string
	docs   []Heredoc
}

func newScanner(file, text string) *scanner {
	text = strings.TrimPrefix(text, "\ufeff")
	s := &scanner{file: file, lines: strings.Split(text, "\n"), escape: '\\'}
	for i, l := range s.lines {
		s.lines[i] = strings.TrimSuffix(l, "\r")
	}
	s.directives()
	return s
}

var directive = regexp.MustCompile(`^#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*$`)

// directives are comments at the very top that say how the file is to be read.
func (s *scanner) directives() {
	for s.at < len(s.lines) {
		m := directive.FindStringSubmatch(strings.TrimSpace(s.lines[s.at]))
		if m == nil {
			return
		}
		if strings.EqualFold(m[1], "escape") && m[2] == "`" {
			s.escape = '`'
		}
		s.at++
	}
}

// next is the next line that says something; ok is false at the end.
func (s *scanner) next() (line logical, ok bool, err error) {
	var b strings.Builder
	begun := false
	for s.at < len(s.lines) {
		raw := s.lines[s.at]
		s.at++
		trimmed := strings.TrimSpace(raw)
		if strings.HasPrefix(trimmed, "#") || trimmed == "" {
			continue // also between lines that continue each other
		}
		if !begun {
			line.number, begun = s.at, true
		}
		part, more := s.continued(raw)
		b.WriteString(part)
		if more {
			continue
		}
		line.text = strings.TrimSpace(b.String())
		line.docs, err = s.heredocs(line)
		return line, true, err
	}
	if begun && strings.TrimSpace(b.String()) != "" { // the last line ends as if another followed
		line.text = strings.TrimSpace(b.String())
		return line, true, nil
	}
	return line, false, nil
}

// continued tells whether the next line belongs to this one.
func (s *scanner) continued(raw string) (text string, more bool) {
	end := strings.TrimRight(raw, " \t")
	if strings.HasSuffix(end, string(s.escape)) {
		return end[:len(end)-1], true
	}
	return raw, false
}

var heredoc = regexp.MustCompile(`(?:^|[\s0-9])<<(-?)(["']?)([A-Za-z_][A-Za-z0-9_]*)(["']?)`)

// heredocs reads the texts that stand below a line.
func (s *scanner) heredocs(line logical) ([]Heredoc, error) {
	name, rest, _ := strings.Cut(line.text, " ")
	switch strings.ToUpper(name) {
	case "RUN", "COPY", "ADD":
	default:
		return nil, nil
	}
	if strings.HasPrefix(strings.TrimSpace(rest), "[") {
		return nil, nil
	}
	var docs []Heredoc
	for _, m := range heredoc.FindAllStringSubmatch(rest, -1) {
		if m[2] != m[4] {
			continue
		}
		d := Heredoc{Name: m[3], Expand: m[2] == ""}
		text, ended := s.until(m[3], m[1] == "-")
		if !ended {
			return nil, &Error{s.file, line.number, "the text that begins with <<" + m[3] + " does not end: there is no line " + m[3]}
		}
		d.Text = text
		docs = append(docs, d)
	}
	return docs, nil
}

// until reads lines up to one that is only a word.
func (s *scanner) until(word string, tabs bool) (text string, ended bool) {
	var b strings.Builder
	for s.at < len(s.lines) {
		l := s.lines[s.at]
		s.at++
		if tabs {
			l = strings.TrimLeft(l, "\t")
		}
		if l == word {
			return b.String(), true
		}
		b.WriteString(l + "\n")
	}
	return "", false
}

var flagForm = regexp.MustCompile(`^--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)`)

// instruction takes a line apart.
func (s *scanner) instruction(line logical) (Instruction, error) {
	i := Instruction{File: s.file, Line: line.number, Docs: line.docs, Flags: map[string]string{}}
	name, rest := line.text, ""
	if at := strings.IndexAny(line.text, " \t"); at >= 0 {
		name, rest = line.text[:at], strings.TrimSpace(line.text[at:])
	}
	i.Name = strings.ToUpper(name)
	i.Text = strings.Join(strings.Fields(i.Name+" "+rest), " ")
	if len(rules[i.Name].flags) > 0 {
		for {
			m := flagForm.FindStringSubmatch(rest)
			if m == nil {
				break
			}
			if old := i.Flags[m[1]]; old != "" {
				m[2] = old + "\n" + m[2]
			}
			i.Flags[m[1]] = m[2]
			rest = strings.TrimSpace(rest[len(m[0]):])
		}
	}
	i.Rest = rest
	if rules[i.Name].json && strings.HasPrefix(rest, "[") {
		var words []string
		if json.Unmarshal([]byte(rest), &words) == nil {
			i.Exec, i.Words = true, words
			return i, nil
		}
		// What is no JSON list is a command that begins with a bracket, as Docker takes it.
	}
	words, err := split(rest, s.escape)
	if err != nil && i.Name != "RUN" && i.Name != "CMD" && i.Name != "ENTRYPOINT" { // which shells read
		return i, i.Errorf("%v", err)
	}
	i.Words = words
	return i, nil
}

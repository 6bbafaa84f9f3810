// Package dockerfile reads Dockerfiles: the part of their language that describes an image which can be built in a
// sandbox. It knows nothing of sandboxes; it says what a file means, or where it is wrong.
package dockerfile

import (
	"fmt"
	"strings"
)

// What a file may hold.
const (
	maxSize   = 1 << 20
	maxStages = 100
	maxSteps  = 2000
)

// File is a Dockerfile.
type File struct {
	Args     []Instruction // ARG lines before the first FROM
	Stages   []Stage
	Warnings []string // what is left out, with file and line
	Escape   byte     // \ or `
}

// Stage is a FROM and what follows it.
type Stage struct {
	From  Instruction // its only word is the image
	Name  string      // AS name, in lower case; empty: none
	Steps []Instruction
}

// Instruction is one line of a Dockerfile, with those that continue it.
type Instruction struct {
	File string
	Line int
	Name string // in upper case
	Text string // as it was written, in one line: what people are shown. Variables are not replaced in it.

	Flags map[string]string // --chown=…, without the dashes
	Exec  bool              // its words are a JSON list
	Words []string          // of the JSON list, or split at spaces; variables are not replaced
	Rest  string            // all of it after the flags, as it was written
	Docs  []Heredoc
}

// Heredoc is text that stands below an instruction.
type Heredoc struct {
	Name   string
	Text   string
	Expand bool // variables are to be replaced in it
}

// Error is what is wrong with a file, and where.
type Error struct {
	File    string
	Line    int
	Message string
}

func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Message) }

// Errorf is a failure of this instruction.
func (i *Instruction) Errorf(format string, args ...any) error {
	return &Error{i.File, i.Line, fmt.Sprintf(format, args...)}
}

// Parse reads a Dockerfile; name is what it is called in errors.
func Parse(name string, text []byte) (*File, error) {
	if len(text) > maxSize {
		return nil, &Error{name, 1, fmt.Sprintf("the file has %d bytes; at most %d are read", len(text), maxSize)}
	}
	s := newScanner(name, string(text))
	f := &File{Escape: s.escape}
	steps := 0
	for {
		line, ok, err := s.next()
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		if steps++; steps > maxSteps {
			return nil, &Error{name, line.number, fmt.Sprintf("more than %d instructions", maxSteps)}
		}
		i, err := s.instruction(line)
		if err != nil {
			return nil, err
		}
		if err := f.add(i); err != nil {
			return nil, err
		}
	}
	if len(f.Stages) == 0 {
		return nil, &Error{name, max(1, s.at), "there is no FROM: the first instruction says what the image is made from"}
	}
	return f, nil
}

// add puts an instruction where it belongs.
func (f *File) add(i Instruction) error {
	rule, known := rules[i.Name]
	if !known {
		return i.Errorf("unknown instruction %s; known are %s", clip(i.Name), strings.Join(knownNames(), ", "))
	}
	if rule.refused != "" {
		return i.Errorf("%s %s", i.Name, rule.refused)
	}
	if err := rule.check(&i); err != nil {
		return err
	}
	switch {
	case i.Name == "FROM":
		return f.stage(i)
	case len(f.Stages) == 0 && i.Name == "ARG":
		f.Args = append(f.Args, i)
	case len(f.Stages) == 0:
		return i.Errorf("%s stands before the first FROM; only ARG may", i.Name)
	case rule.ignored != "":
		f.Warnings = append(f.Warnings, fmt.Sprintf("%s:%d: %s is left out: %s", i.File, i.Line, i.Name, rule.ignored))
	default:
		last := &f.Stages[len(f.Stages)-1]
		last.Steps = append(last.Steps, i)
		if i.Name == "RUN" && i.Flags["mount"] != "" {
			f.Warnings = append(f.Warnings, fmt.Sprintf("%s:%d: --mount=type=cache is left out: the whole build is cached instead", i.File, i.Line))
		}
	}
	return nil
}

// stage begins one with a FROM.
func (f *File) stage(i Instruction) error {
	s := Stage{From: i}
	switch {
	case len(i.Words) == 3 && strings.EqualFold(i.Words[1], "AS"):
		s.Name = strings.ToLower(i.Words[2])
		s.From.Words = i.Words[:1]
		if !stageName.MatchString(s.Name) {
			return i.Errorf("%s is not a name for a stage: use letters, digits, '-', '_' and '.'", clip(i.Words[2]))
		}
		if _, twice := f.Find(s.Name); twice {
			return i.Errorf("there are two stages with the name %s", s.Name)
		}
	case len(i.Words) != 1:
		return i.Errorf("write FROM IMAGE or FROM IMAGE AS NAME")
	}
	if len(f.Stages) == maxStages {
		return i.Errorf("more than %d stages", maxStages)
	}
	f.Stages = append(f.Stages, s)
	return nil
}

// Find is the index of a stage by its name.
func (f *File) Find(name string) (int, bool) {
	for i, s := range f.Stages {
		if s.Name != "" && s.Name == strings.ToLower(name) {
			return i, true
		}
	}
	return 0, false
}

// clip is a text of others in a message.
func clip(s string) string { return fmt.Sprintf("%.60q", s) }

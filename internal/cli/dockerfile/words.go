package dockerfile

import (
	"errors"
	"fmt"
	"strings"
)

var errQuote = errors.New("a quote is not closed")

// split divides text at spaces that are neither quoted nor escaped. Quotes stay.
func split(text string, escape byte) ([]string, error) {
	var words []string
	var b strings.Builder
	inside, quote := false, byte(0)
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case quote == 0 && (c == ' ' || c == '\t'):
			if inside {
				words = append(words, b.String())
				b.Reset()
				inside = false
			}
			continue
		case c == escape && quote != '\'' && i+1 < len(text):
			b.WriteByte(c)
			i++
			c = text[i]
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
		case c == quote:
			quote = 0
		}
		inside = true
		b.WriteByte(c)
	}
	if quote != 0 {
		return nil, errQuote
	}
	if inside {
		words = append(words, b.String())
	}
	return words, nil
}

// Lookup is the value of a variable; ok is false where there is none.
type Lookup func(name string) (value string, ok bool)

// Expand takes quotes away and replaces variables: $NAME, ${NAME}, ${NAME:-word}, ${NAME:+word} and ${NAME:?word}, the
// last three also without the colon. Between single quotes nothing is replaced.
func (f *File) Expand(word string, known Lookup) (string, error) {
	e := expander{text: word, escape: f.Escape, known: known}
	out, err := e.until(0)
	if err != nil {
		return "", fmt.Errorf("%s: %w", clip(word), err)
	}
	return out, nil
}

// ExpandText replaces variables in a heredoc, where quotes are only characters.
func (f *File) ExpandText(text string, known Lookup) (string, error) {
	e := expander{text: text, escape: f.Escape, known: known, plain: true}
	return e.until(0)
}

type expander struct {
	text   string
	at     int
	depth  int
	escape byte
	known  Lookup
	plain  bool // quotes mean nothing
}

// until reads up to a closing brace, or to the end.
func (e *expander) until(end byte) (string, error) {
	var b strings.Builder
	quote := byte(0)
	for e.at < len(e.text) {
		c := e.text[e.at]
		e.at++
		switch {
		case end != 0 && c == end && quote == 0:
			return b.String(), nil
		case c == e.escape && quote != '\'' && e.at < len(e.text):
			e.escaped(&b, quote)
		case !e.plain && quote == 0 && (c == '"' || c == '\''):
			quote = c
		case !e.plain && quote != 0 && c == quote:
			quote = 0
		case c == '$' && quote != '\'':
			value, err := e.variable()
			if err != nil {
				return "", err
			}
			b.WriteString(value)
		default:
			b.WriteByte(c)
		}
	}
	switch {
	case quote != 0:
		return "", errQuote
	case end != 0:
		return "", errors.New("a brace is not closed")
	}
	return b.String(), nil
}

// escaped writes what follows an escape: between double quotes only what means something there loses it.
func (e *expander) escaped(b *strings.Builder, quote byte) {
	next := e.text[e.at]
	e.at++
	special := next == '$' || next == e.escape || !e.plain && next == '"'
	if (quote == '"' || e.plain) && !special {
		b.WriteByte(e.escape)
	}
	b.WriteByte(next)
}

func (e *expander) variable() (string, error) {
	if e.at < len(e.text) && e.text[e.at] == '{' {
		e.at++
		return e.braced()
	}
	name := e.name()
	if name == "" {
		return "$", nil
	}
	value, _ := e.known(name)
	return value, nil
}

func (e *expander) name() string {
	begin := e.at
	for e.at < len(e.text) && isNameByte(e.text[e.at], e.at == begin) {
		e.at++
	}
	return e.text[begin:e.at]
}

func isNameByte(c byte, first bool) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || !first && c >= '0' && c <= '9'
}

// maxDepth is how deep variables may stand in each other's defaults.
const maxDepth = 20

func (e *expander) braced() (string, error) {
	name := e.name()
	if name == "" || e.at >= len(e.text) {
		return "", errors.New("${ wants the name of a variable and }")
	}
	value, set := e.known(name)
	op := e.text[e.at]
	e.at++
	if op == '}' {
		return value, nil
	}
	if op == ':' && e.at < len(e.text) {
		op = e.text[e.at]
		e.at++
		set = set && value != ""
	}
	if op != '-' && op != '+' && op != '?' {
		return "", fmt.Errorf("${%s…}: known are ${%[1]s:-word}, ${%[1]s:+word} and ${%[1]s:?word}", name)
	}
	if e.depth++; e.depth > maxDepth {
		return "", errors.New("variables stand too deep in each other")
	}
	defer func() { e.depth-- }()
	word, err := e.until('}')
	if err != nil {
		return "", err
	}
	switch {
	case op == '+' && set:
		return word, nil
	case op == '+':
		return "", nil
	case set:
		return value, nil
	case op == '?':
		return "", fmt.Errorf("%s is not set: %s", name, word)
	}
	return word, nil
}

// Pair is a name and its value.
type Pair struct{ Name, Value string }

// Pairs are what ENV, LABEL or ARG say, with variables replaced.
func (f *File) Pairs(i *Instruction, known Lookup) ([]Pair, error) {
	if i.Name != "ARG" && !strings.Contains(i.Words[0], "=") { // ENV NAME the rest
		rest := strings.TrimSpace(strings.TrimPrefix(i.Rest, i.Words[0]))
		value, err := f.Expand(rest, known)
		if err != nil {
			return nil, i.Errorf("%v", err)
		}
		return []Pair{{i.Words[0], value}}, nil
	}
	var all []Pair
	for _, w := range i.Words {
		name, value, _ := strings.Cut(w, "=")
		value, err := f.Expand(value, known)
		if err == nil {
			name, err = f.Expand(name, known)
		}
		if err != nil {
			return nil, i.Errorf("%v", err)
		}
		all = append(all, Pair{name, value})
	}
	return all, nil
}

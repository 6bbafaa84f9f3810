package execd

import (
	"net/http"
	"path"
	"strings"
)

const (
	maxPattern  = 1024 // bytes
	maxPatterns = 256  // that braces make of one
)

// patterns makes of one pattern those that path.Match knows: {a,b} becomes two, and ** is * since only the last part of a
// path is looked at. None matches everything.
func patterns(text string) ([]string, error) {
	bad := &refusal{http.StatusBadRequest, codeQuery, "pattern " + short(text) + " is not one of file names: use *, ?, [a-z] and {one,other}"}
	if text == "" {
		text = "*"
	}
	if len(text) > maxPattern || strings.Contains(text, "\x00") {
		return nil, bad
	}
	text = text[strings.LastIndexByte(text, '/')+1:] // **/*.py is meant for every directory anyway
	list, ok := braces(text, nil, 0)
	if !ok {
		return nil, bad
	}
	for i, one := range list {
		for strings.Contains(one, "**") {
			one = strings.ReplaceAll(one, "**", "*")
		}
		if strings.Contains(one, "[!") { // as shells say it
			one = strings.ReplaceAll(one, "[!", "[^")
		}
		if _, err := path.Match(one, ""); err != nil {
			return nil, bad
		}
		list[i] = one
	}
	return list, nil
}

// braces writes a pattern out for each of its alternatives.
func braces(text string, list []string, depth int) ([]string, bool) {
	open := strings.IndexByte(text, '{')
	if open < 0 {
		return append(list, text), len(list) < maxPatterns
	}
	parts, rest, ok := alternatives(text[open+1:])
	if !ok || depth > 16 {
		return nil, false
	}
	for _, part := range parts {
		if list, ok = braces(text[:open]+part+rest, list, depth+1); !ok {
			return nil, false
		}
	}
	return list, true
}

// alternatives reads up to the brace that closes, and cuts at the commas between.
func alternatives(text string) (parts []string, rest string, ok bool) {
	depth, from := 0, 0
	for i := range len(text) {
		switch c := text[i]; {
		case c == '{':
			depth++
		case c == '}' && depth > 0:
			depth--
		case c == '}':
			return append(parts, text[from:i]), text[i+1:], true
		case c == ',' && depth == 0:
			parts, from = append(parts, text[from:i]), i+1
		}
	}
	return nil, "", false
}

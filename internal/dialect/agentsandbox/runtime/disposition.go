package runtime

import (
	"net/url"
	"strings"
)

// disposition is what a part of a form says of itself.
type disposition struct{ name, filename string }

// parseDisposition reads the header Content-Disposition of a part. The standard library's reader cuts the directories off a
// filename, and here they are what matters.
func parseDisposition(header string) (d disposition) {
	_, rest, _ := strings.Cut(header, ";")
	extended := false
	for rest != "" {
		var key, value string
		key, value, rest = nextParameter(rest)
		switch key {
		case "name":
			d.name = value
		case "filename":
			if !extended {
				d.filename = unescapeForm(value)
			}
		case "filename*": // RFC 5987: UTF-8'language'percent-encoded
			if text, ok := extendedValue(value); ok {
				d.filename, extended = text, true
			}
		}
	}
	return d
}

// nextParameter reads one name=value, quoted or not.
func nextParameter(text string) (key, value, rest string) {
	text = strings.TrimLeft(text, " \t;")
	at := strings.IndexAny(text, "=;")
	if at < 0 {
		return strings.ToLower(strings.TrimSpace(text)), "", ""
	}
	key = strings.ToLower(strings.TrimSpace(text[:at]))
	if text[at] == ';' {
		return key, "", text[at+1:]
	}
	text = strings.TrimLeft(text[at+1:], " \t")
	if !strings.HasPrefix(text, `"`) {
		value, rest, _ = strings.Cut(text, ";")
		return key, strings.TrimSpace(value), rest
	}
	value, rest = quoted(text[1:])
	return key, value, rest
}

// quoted reads up to the closing quote. A backslash escapes a quote and itself and is a character otherwise: some clients escape,
// and some do not.
func quoted(text string) (value, rest string) {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return out.String(), text[i+1:]
		case c == '\\' && i+1 < len(text) && (text[i+1] == '"' || text[i+1] == '\\'):
			i++
			out.WriteByte(text[i])
		default:
			out.WriteByte(c)
		}
	}
	return out.String(), ""
}

// formEscapes are what browsers and Python's clients write for the three characters that a quoted value cannot hold. Everything
// else is as it is: a file may be called "100%20".
var formEscapes = strings.NewReplacer("%22", `"`, "%0A", "\n", "%0D", "\r")

func unescapeForm(value string) string { return formEscapes.Replace(value) }

func extendedValue(value string) (string, bool) {
	charset, rest, ok := strings.Cut(value, "'")
	_, encoded, ok2 := strings.Cut(rest, "'")
	if !ok || !ok2 || !strings.EqualFold(charset, "UTF-8") {
		return "", false
	}
	text, err := url.PathUnescape(encoded)
	return text, err == nil
}

package auth

import (
	"encoding/base64"
	"encoding/hex"
	"iter"
	"regexp"
	"slices"
	"strings"
)

// OwnHeaders are the headers that carry nothing but keys and tokens of this server, in canonical form, in any dialect.
var OwnHeaders = []string{
	"Open-Sandbox-Api-Key", "Opensandbox-Secure-Access", "Opensandbox-Egress-Auth", "X-Execd-Access-Token", "E2b-Traffic-Access-Token",
}

// SharedHeaders are the headers that carry keys and tokens of this server and of others, in canonical form.
var SharedHeaders = []string{"X-Api-Key", "Authorization", "X-Access-Token"}

// parameters are the names of query parameters, in lower case, that clients put keys into beside the names of headers.
var parameters = []string{"api_key", "apikey", "api-key", "access_token"}

// Carries reports whether a query parameter of this name holds a key or a token, by the names that clients give it.
func Carries(parameter string) bool {
	is := func(name string) bool { return strings.EqualFold(name, parameter) }
	return slices.ContainsFunc(OwnHeaders, is) || slices.ContainsFunc(SharedHeaders, is) || slices.ContainsFunc(parameters, is)
}

var (
	// prefixed is a key, or a part of one that helps to guess the rest, whatever is around it.
	prefixed = regexp.MustCompile(keyPrefix + `[0-9a-f]{16,}`)
	// digits are those of a key or a token that stand alone. Tokens have 64.
	digits = regexp.MustCompile(`\b(?:` + keyPrefix + `)?([0-9a-f]{40}|[0-9a-f]{64})\b`)
	// basic is a value of the scheme Basic, also one in a query, where a space is a plus sign.
	basic = regexp.MustCompile(`(?i)\bbasic[\s+]+([0-9a-z+/_-]+)`)
)

// HasKey reports whether a text holds a key with its prefix, which nothing else looks like.
func HasKey(text string) bool { return strings.Contains(text, keyPrefix) && prefixed.MatchString(text) }

// Digits are those of the keys and tokens in the value of a carrier. In other places, 40 hex digits
// may be anything, such as the hash of a commit: see Lookalikes.
func Digits(value string) []string {
	var found []string
	for _, text := range Readings(value) {
		for _, m := range digits.FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
	}
	return found
}

// Lookalikes yields each run of exactly 40 hex digits in a text: the form of a key without its
// prefix. Keys.Known tells keys from other texts of that form.
func Lookalikes(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		start := 0
		for i := range len(text) + 1 {
			if i < len(text) && (text[i] >= '0' && text[i] <= '9' || text[i] >= 'a' && text[i] <= 'f') {
				continue
			}
			if i-start == keyDigits && !yield(text[start:i]) {
				return
			}
			start = i + 1
		}
	}
}

// maxUnescape is how often a text is unescaped: an address in the query of an address is escaped
// twice.
const maxUnescape = 3

// Readings returns a text, what it says in percent encoding, and what it holds as scheme Basic.
func Readings(text string) []string {
	texts := []string{text}
	for range maxUnescape {
		plain := unescape(text)
		if plain == text {
			break
		}
		text = plain
		texts = append(texts, text)
	}
	for _, text := range texts {
		if !mentionsBasic(text) {
			continue
		}
		for _, m := range basic.FindAllStringSubmatch(text, -1) {
			b, _ := base64.RawStdEncoding.DecodeString(standard.Replace(m[1])) // as much as can be read
			texts = append(texts, string(b))
		}
	}
	return texts
}

// mentionsBasic spares most texts the regular expression, which is slow.
func mentionsBasic(text string) bool {
	const scheme = "basic"
	for i := range len(text) - len(scheme) + 1 {
		if (text[i] == 'b' || text[i] == 'B') && strings.EqualFold(text[i:i+len(scheme)], scheme) {
			return true
		}
	}
	return false
}

// standard turns the alphabet of base64 for URLs into the usual one.
var standard = strings.NewReplacer("-", "+", "_", "/")

// unescape decodes what is percent-encoded in a text and leaves other percent signs.
func unescape(text string) string {
	if !strings.Contains(text, "%") {
		return text
	}
	plain := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] == '%' && i+2 < len(text) {
			if b, err := hex.DecodeString(text[i+1 : i+3]); err == nil {
				plain = append(plain, b[0])
				i += 2
				continue
			}
		}
		plain = append(plain, text[i])
	}
	return string(plain)
}

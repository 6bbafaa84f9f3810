package auth

import (
	"encoding/base64"
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
)

// HasKey reports whether a text holds a key with its prefix, which nothing else looks like.
func HasKey(text string) bool { return strings.Contains(text, keyPrefix) && prefixed.MatchString(text) }

// Digits are those of the keys and tokens in the value of a carrier. Outside of one, a text of 40 hex digits may be anything: a
// commit's hash is one.
func Digits(value string) []string {
	var found []string
	for _, text := range []string{value, basic(value)} {
		for _, m := range digits.FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
	}
	return found
}

// basic is what an Authorization of the scheme Basic holds.
func basic(value string) string {
	scheme, text, _ := strings.Cut(value, " ")
	if !strings.EqualFold(scheme, "Basic") {
		return ""
	}
	b, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(text)) // of what is not, as much as can be read
	return string(b)
}

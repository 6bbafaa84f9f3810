package agentsandbox

import (
	"slices"
	"strings"
)

// maxRequirements bounds a selector.
const maxRequirements = 100

// Selector chooses objects by their labels, and by the few fields that can be asked for.
type Selector struct {
	labels []requirement
	fields []requirement
}

// requirement is one condition. Without values it asks whether the key is there.
type requirement struct {
	key    string
	values []string
	not    bool
}

// ParseSelector reads the label selector and the field selector of a request.
func ParseSelector(labels, fieldText string) (Selector, error) {
	l, err := parseLabels(labels)
	if err != nil {
		return Selector{}, err
	}
	f, err := parseFields(fieldText)
	return Selector{l, f}, err
}

func parseLabels(text string) ([]requirement, error) {
	var all []requirement
	for rest := strings.TrimSpace(text); rest != ""; {
		var part string
		part, rest = cutRequirement(rest)
		r, ok := parseLabel(part)
		if !ok || len(all) == maxRequirements {
			return nil, badRequest("unable to parse requirement: %.120q: write a selector as key=value, key!=value, key in (a,b), key notin (a,b), key or !key", part)
		}
		all = append(all, r)
	}
	return all, nil
}

// cutRequirement cuts at the first comma outside of parentheses.
func cutRequirement(text string) (part, rest string) {
	depth := 0
	for i, c := range text {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				return strings.TrimSpace(text[:i]), strings.TrimLeft(text[i+1:], " ")
			}
		}
	}
	return strings.TrimSpace(text), ""
}

func parseLabel(text string) (requirement, bool) {
	if key, ok := strings.CutPrefix(text, "!"); ok && !strings.ContainsAny(key, "=(") {
		key = strings.TrimSpace(key)
		return requirement{key: key, not: true}, isQualified(key)
	}
	if set, ok := strings.CutSuffix(text, ")"); ok {
		return parseSet(set)
	}
	key, value, not, ok := cutEquals(text)
	if !ok {
		return requirement{key: text}, isQualified(text)
	}
	return requirement{key, []string{value}, not}, isQualified(key) && isLabelValue(value)
}

// parseSet reads "key in (a,b" and "key notin (a,b".
func parseSet(text string) (requirement, bool) {
	head, values, ok := strings.Cut(text, "(")
	words := strings.Fields(head)
	if !ok || len(words) != 2 || words[1] != "in" && words[1] != "notin" {
		return requirement{}, false
	}
	r := requirement{key: words[0], not: words[1] == "notin"}
	for v := range strings.SplitSeq(values, ",") {
		v = strings.TrimSpace(v)
		if !isLabelValue(v) {
			return requirement{}, false
		}
		r.values = append(r.values, v)
	}
	return r, isQualified(r.key)
}

func cutEquals(text string) (key, value string, not, ok bool) {
	for _, operator := range []string{"!=", "==", "="} {
		if key, value, ok = strings.Cut(text, operator); ok {
			return strings.TrimSpace(key), strings.TrimSpace(value), operator == "!=", true
		}
	}
	return "", "", false, false
}

func parseFields(text string) ([]requirement, error) {
	var all []requirement
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		key, value, not, ok := cutEquals(part)
		if !ok || len(all) == maxRequirements {
			return nil, badRequest("invalid field selector %.120q; want metadata.name=NAME", part)
		}
		if key != "metadata.name" && key != "metadata.namespace" {
			return nil, badRequest("field label not supported: %.120s", key)
		}
		all = append(all, requirement{key, []string{value}, not})
	}
	return all, nil
}

// MatchesLabels tells whether labels are chosen.
func (s Selector) MatchesLabels(labels map[string]string) bool {
	return !slices.ContainsFunc(s.labels, func(r requirement) bool {
		value, has := labels[r.key]
		met := has && (r.values == nil || slices.Contains(r.values, value))
		return met == r.not
	})
}

func (s Selector) matches(o *object) bool {
	if o == nil {
		return false
	}
	return s.matchesNames(o.namespace(), o.name()) && (len(s.labels) == 0 || s.MatchesLabels(texts(o.body, "metadata", "labels")))
}

func (s Selector) matchesNames(namespace, name string) bool {
	return !slices.ContainsFunc(s.fields, func(r requirement) bool {
		value := name
		if r.key == "metadata.namespace" {
			value = namespace
		}
		return slices.Contains(r.values, value) == r.not
	})
}

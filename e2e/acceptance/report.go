package acceptance

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Entry says of one row whether it holds, and what proves it.
type Entry struct {
	ID    string `json:"id"`
	State string `json:"state"` // pass, fail or excluded
	// Test is the first test that names the row, Also the others.
	Test string   `json:"test,omitempty"`
	Also []string `json:"also,omitempty"`
	Why  string   `json:"why,omitempty"`
}

// Judge says how every row stands after the tests that ran. A row holds when tests name it, at least one of them ran, and none failed.
func Judge(outcomes []Outcome) []Entry {
	named := map[string]map[string]string{} // row → test → state
	for _, o := range outcomes {
		for _, id := range IDs(lastPart(o.Test)) {
			if named[id] == nil {
				named[id] = map[string]string{}
			}
			named[id][o.Test] = worse(named[id][o.Test], o.State)
		}
	}
	excluded := Excluded()
	var entries []Entry
	for _, row := range Rows() {
		entries = append(entries, judge(row.ID, named[row.ID], excluded[row.ID]))
	}
	return entries
}

// lastPart is the name that a test was given itself, without those of the tests around it.
func lastPart(test string) string {
	if i := strings.LastIndex(test, "::"); i >= 0 {
		return test[i+2:]
	}
	_, name, _ := strings.Cut(test, ":")
	return name[strings.LastIndex(name, "/")+1:]
}

// worse joins the states of a test that ran more than once, as one with parameters does.
func worse(a, b string) string {
	for _, state := range []string{"fail", "pass"} {
		if a == state || b == state {
			return state
		}
	}
	return b
}

func judge(id string, tests map[string]string, why string) Entry {
	if why != "" {
		return Entry{ID: id, State: "excluded", Why: why}
	}
	by := map[string][]string{}
	for _, test := range slices.Sorted(maps.Keys(tests)) {
		by[tests[test]] = append(by[tests[test]], test)
	}
	switch {
	case len(by["fail"]) > 0:
		return Entry{ID: id, State: "fail", Test: by["fail"][0], Also: by["fail"][1:], Why: "the test failed"}
	case len(by["pass"]) > 0:
		return Entry{ID: id, State: "pass", Test: by["pass"][0], Also: by["pass"][1:]}
	case len(by["skip"]) > 0:
		return Entry{ID: id, State: "fail", Test: by["skip"][0], Why: "the test was skipped"}
	}
	return Entry{ID: id, State: "fail", Why: "no test that ran names it"}
}

// Page is the report for people.
func Page(entries []Entry) string {
	var b strings.Builder
	b.WriteString("# Acceptance\n\nWhat Cove promises, and the test that proves it. `make acceptance` writes this page and `acceptance.json` from a run.\n\n")
	b.WriteString("| chapter | rows | pass | fail | excluded |\n|---|---|---|---|---|\n")
	for _, c := range Chapters {
		countLine(&b, c.Prefix+" "+c.Title, inChapter(entries, c.Prefix))
	}
	countLine(&b, "all", entries)
	text := map[string]string{}
	for _, row := range Rows() {
		text[row.ID] = row.Text
	}
	for _, c := range Chapters {
		fmt.Fprintf(&b, "\n## %s %s\n\n| row | | state | test |\n|---|---|---|---|\n", c.Prefix, c.Title)
		for _, e := range inChapter(entries, c.Prefix) {
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", e.ID, cell(text[e.ID]), e.State, cell(proof(e)))
		}
	}
	return b.String()
}

func proof(e Entry) string {
	words := e.Why
	if e.Test != "" {
		words = strings.TrimSpace("`" + e.Test + "` " + e.Why)
	}
	if n := len(e.Also); n > 0 {
		words += fmt.Sprintf(" and %d more", n)
	}
	return words
}

// cell is text that does not end a table's cell.
func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }

func inChapter(entries []Entry, prefix string) []Entry {
	var found []Entry
	for _, e := range entries {
		if strings.HasPrefix(e.ID, prefix+".") {
			found = append(found, e)
		}
	}
	return found
}

func countLine(b *strings.Builder, title string, entries []Entry) {
	n := map[string]int{}
	for _, e := range entries {
		n[cmp.Or(e.State, "fail")]++
	}
	fmt.Fprintf(b, "| %s | %d | %d | %d | %d |\n", title, len(entries), n["pass"], n["fail"], n["excluded"])
}

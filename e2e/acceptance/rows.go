// Package acceptance knows what Cove promises, row by row, and tells which test proves each row.
package acceptance

import (
	_ "embed"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

var (
	//go:embed rows.tsv
	rowsText string
	//go:embed excluded.tsv
	excludedText string
)

// Row is one promise.
type Row struct{ ID, Text string }

// Chapters are the groups of rows, by the first part of their ids.
var Chapters = []struct{ Prefix, Title string }{
	{"S0", "Agents of LangChain and LangGraph over the E2B SDK"},
	{"S1", "deepagents, and a tool that runs Python"},
	{"S2", "Snippets of a LangGraph agent, each one a span"},
	{"S3", "OpenSandbox's SDK and a LangGraph workflow over it"},
	{"S4", "Sessions, datasets and artifacts"},
}

// Rows are all promises, in order.
func Rows() []Row {
	var rows []Row
	for id, text := range pairs(rowsText) {
		rows = append(rows, Row{id, text})
	}
	return rows
}

// Excluded are the rows that do not hold yet, with the reason.
func Excluded() map[string]string {
	why := map[string]string{}
	for id, text := range pairs(excludedText) {
		why[id] = text
	}
	return why
}

func pairs(text string) func(yield func(string, string) bool) {
	return func(yield func(string, string) bool) {
		for line := range strings.Lines(text) {
			id, rest, _ := strings.Cut(strings.TrimSpace(line), "\t")
			if id != "" && !yield(id, rest) {
				return
			}
		}
	}
}

// idPattern finds ids in the names of tests: S4.40 in words, S4_40 in identifiers.
var idPattern = regexp.MustCompile(`S([0-4])[._]([0-9]+)`)

// IDs are the rows that a name names, in its order and once each.
func IDs(name string) []string {
	var ids []string
	seen := map[string]bool{}
	for _, m := range idPattern.FindAllStringSubmatch(name, -1) {
		n, err := strconv.Atoi(m[2])
		id := fmt.Sprintf("S%s.%d", m[1], n)
		if err == nil && !seen[id] {
			ids, seen[id] = append(ids, id), true
		}
	}
	return ids
}

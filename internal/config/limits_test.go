package config_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/config"
)

// limitName matches the last part of a setting that bounds something.
var limitName = regexp.MustCompile(`^(max_|paused_lifetime|default_lifetime|create_rate|open_files|reserve)|` +
	`(_per_tenant|_timeout|_ttl|_size|_bytes)$|^(size|cpus|memory|pids|disk|retention|lifetime)$`)

// TestLimits_Document compares docs/limits.md with the settings: every limit that an operator can
// set has a row there, with the default that Default returns.
func TestLimits_Document(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "limits.md"))
	if err != nil {
		t.Fatal(err)
	}
	settings, err := config.Explain(config.Source{Env: none})
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, s := range settings {
		known[s.Name] = true
		section, last, _ := strings.Cut(s.Name, ".")
		last = last[strings.LastIndex(last, ".")+1:]
		if section == "kubernetes" || !limitName.MatchString(last) { // Pods of a template: docs/kubernetes.md
			continue
		}
		row := rowOf(string(text), s.Name)
		if row == nil {
			t.Errorf("docs/limits.md has no row for %s", s.Name)
			continue
		}
		if s.Value != "" && !sameValue(row[2], s.Value) {
			t.Errorf("docs/limits.md says that %s is %s by default; it is %s", s.Name, row[2], s.Value)
		}
	}
	for _, m := range regexp.MustCompile("`([a-z0-9]+\\.[a-z_]+)`").FindAllStringSubmatch(string(text), -1) {
		if !known[m[1]] {
			t.Errorf("docs/limits.md has a setting %s that does not exist", m[1])
		}
	}
}

// rowOf returns the cells of the first table row that names a setting.
func rowOf(document, setting string) []string {
	for line := range strings.Lines(document) {
		if strings.HasPrefix(line, "|") && strings.Contains(line, "`"+setting+"`") {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			return cells
		}
	}
	return nil
}

// sameValue reports whether a cell for people, such as "50 GiB" or "30 days", is a setting's value.
func sameValue(cell, value string) bool {
	for word := range strings.SplitSeq(cell, ";") {
		word = strings.TrimSpace(word)
		if compact := strings.NewReplacer(" ", "", ",", "").Replace(word); compact == value {
			return true
		}
		want, err := time.ParseDuration(value)
		number, unit, _ := strings.Cut(word, " ")
		n, notNumber := strconv.ParseFloat(number, 64)
		per := map[string]time.Duration{"s": time.Second, "seconds": time.Second, "minutes": time.Minute, "hours": time.Hour, "days": 24 * time.Hour}[unit]
		if err == nil && notNumber == nil && time.Duration(n*float64(per)) == want {
			return true
		}
	}
	return false
}

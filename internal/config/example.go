package config

import (
	"embed"
	"fmt"
	"slices"
	"strings"
)

// examples are whole configuration files with a word about each setting.
//
//go:embed examples/*.toml
var examples embed.FS

// Examples are the names of the example configurations.
func Examples() []string {
	entries, err := examples.ReadDir("examples")
	if err != nil {
		panic(err) // it is part of this program
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".toml"))
	}
	return names
}

// Example is a configuration file to begin with.
func Example(kind string) (string, error) {
	if names := Examples(); !slices.Contains(names, kind) {
		return "", fmt.Errorf("there is no example %q: use %s", kind, strings.Join(names, ", "))
	}
	text, err := examples.ReadFile("examples/" + kind + ".toml")
	return string(text), err
}

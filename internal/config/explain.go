package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// Setting is one value of a configuration and where it comes from.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"` // empty: left to the server
	From  string `json:"from"`  // FromDefault, or which flag, variable or file decided it
}

// FromDefault is a setting that nobody has decided.
const FromDefault = "default"

// Explain is Load, told setting by setting.
func Explain(src Source) ([]Setting, error) {
	c, err := Load(src)
	if err != nil {
		return nil, err
	}
	path, _ := src.file()
	var inFile toml.MetaData // of nothing, where there is no file: Load has complained if there should be one
	if meta, err := toml.DecodeFile(path, &Config{}); err == nil {
		inFile = meta
	}
	settings := c.settings()
	var all []Setting
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if name == "-" { // not an operator's to decide
			continue
		}
		s := Setting{Name: name, Value: text(settings[name]), From: FromDefault}
		_, inFlags := src.Flags[name]
		_, inEnv := src.Env(EnvName(name))
		switch {
		case inFlags:
			s.From = "flag --" + strings.NewReplacer("_", "-", ".", "-").Replace(name)
		case inEnv:
			s.From = "environment " + EnvName(name)
		case inFile.IsDefined(strings.Split(name, ".")...):
			s.From = "file " + path
		}
		all = append(all, s)
	}
	return all, nil
}

// text is a setting as it is written; the zero value is nobody's choice.
func text(v reflect.Value) string {
	if v.IsZero() {
		return ""
	}
	if list, ok := v.Interface().([]string); ok {
		return strings.Join(list, ",")
	}
	if kinds, ok := v.Interface().(KubernetesKinds); ok {
		return kinds.String()
	}
	if v.Kind() == reflect.Map {
		return mapText(v)
	}
	return fmt.Sprint(v.Interface())
}

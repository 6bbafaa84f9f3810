package template

import (
	"bytes"
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/covehq/cove/internal/fault"
)

//go:embed defaults/*.toml defaults/*.lock
var defaults embed.FS

// Definition is a template as a person writes it: one TOML file. What a definition leaves out, the one it is made
// From decides; lists of host paths, files, links, environment and preload add up.
type Definition struct {
	Name        string            `toml:"name"`
	Description string            `toml:"description"`
	From        string            `toml:"from"`
	User        string            `toml:"user"`
	Workdir     string            `toml:"workdir"`
	Sudo        *bool             `toml:"sudo"`
	Limits      LimitsDefinition  `toml:"limits"`
	Env         map[string]string `toml:"env"`
	Host        HostDefinition    `toml:"host"`
	Files       map[string]string `toml:"files"` // absolute path inside → content, owned by root
	Links       map[string]string `toml:"links"` // absolute path inside → target
	Python      PythonDefinition  `toml:"python"`

	source string // which file says so, for errors
	lock   []byte // content of Python.Packages
}

// HostDefinition is the allow-list of what comes from the host.
type HostDefinition struct {
	Trees []string `toml:"trees"` // directories seen at the same path
	Hide  []string `toml:"hide"`  // directories of those trees that are empty inside
	Copy  []string `toml:"copy"`  // copied when the template is built
	Etc   []string `toml:"etc"`   // names or patterns below /etc, copied when the template is built
}

// PythonDefinition says which interpreter and which packages.
type PythonDefinition struct {
	Find     []string `toml:"find"`     // conditions (">=3.12,<3.15") tried in order, or one absolute path
	Packages string   `toml:"packages"` // lock file with hashes, beside the definition
	Preload  []string `toml:"preload"`
	Warmup   string   `toml:"warmup"`
	Prepare  string   `toml:"prepare"`  // code run once at build time; what it leaves in the home directory stays
	Optional bool     `toml:"optional"` // build without Python where the host has none that fits
}

// LimitsDefinition is Limits with sizes as people write them.
type LimitsDefinition struct {
	CPUs      float64 `toml:"cpus"`
	Memory    Size    `toml:"memory"`
	Pids      int     `toml:"pids"`
	Disk      Size    `toml:"disk"`
	OpenFiles int     `toml:"open_files"`
}

// Size is a number of bytes, written as 512MiB, 2GB or a plain number.
type Size int64

// UnmarshalTOML reads a size.
func (s *Size) UnmarshalTOML(value any) error {
	n, err := parseSize(fmt.Sprint(value))
	*s = Size(n)
	return err
}

var (
	sizePattern = regexp.MustCompile(`^(\d+)\s*([KMGT]i?)?B?$`)
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
)

func parseSize(text string) (int64, error) {
	m := sizePattern.FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("%q is not a size; write 512MiB or 2GB", text)
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil {
		return 0, err
	}
	if m[2] == "" {
		return n, nil
	}
	base := int64(1000)
	if strings.HasSuffix(m[2], "i") {
		base = 1024
	}
	for range strings.IndexByte("KMGT", m[2][0]) + 1 {
		if n > (1<<62)/base {
			return 0, fmt.Errorf("%q is too large", text)
		}
		n *= base
	}
	return n, nil
}

// Parse reads one definition strictly; source names the file in errors and readBeside reads a file next to it.
func Parse(source string, text []byte, readBeside func(name string) ([]byte, error)) (*Definition, error) {
	d := &Definition{source: source}
	meta, err := toml.NewDecoder(bytes.NewReader(text)).Decode(d)
	if err != nil {
		return nil, fault.New(fault.Invalid, "%s: %s", source, tomlMessage(err))
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return nil, fault.New(fault.Invalid, "%s: unknown key %s", source, unknown[0])
	}
	if d.Python.Packages != "" {
		if d.Python.Packages != filepath.Base(d.Python.Packages) {
			return nil, d.invalid("python.packages", "%q must be a file beside the definition", d.Python.Packages)
		}
		if d.lock, err = readBeside(d.Python.Packages); err != nil {
			return nil, d.invalid("python.packages", "%v", err)
		}
	}
	return d, d.validate()
}

func tomlMessage(err error) string {
	var parse toml.ParseError
	if errors.As(err, &parse) {
		return fmt.Sprintf("line %d: %s", parse.Position.Line, cmp.Or(parse.Message, parse.Error()))
	}
	return strings.TrimPrefix(err.Error(), "toml: ")
}

func (d *Definition) invalid(key, format string, args ...any) error {
	return fault.New(fault.Invalid, "%s: %s: %s", d.source, key, fmt.Sprintf(format, args...))
}

func (d *Definition) validate() error {
	if !namePattern.MatchString(d.Name) {
		return d.invalid("name", "%q must be lower-case letters, digits, dots, dashes or underscores", d.Name)
	}
	if d.User != "" && d.User != "user" && d.User != "root" {
		return d.invalid("user", "%q is neither user nor root", d.User)
	}
	if l := d.Limits; l.CPUs < 0 || l.Pids < 0 || l.OpenFiles < 0 {
		return d.invalid("limits", "a limit is negative")
	}
	for key, paths := range map[string][]string{
		"workdir": nonEmpty(d.Workdir), "host.trees": d.Host.Trees, "host.hide": d.Host.Hide, "host.copy": d.Host.Copy,
		"files": slices.Collect(maps.Keys(d.Files)), "links": slices.Collect(maps.Keys(d.Links)),
	} {
		for _, p := range paths {
			if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsAny(p, "\x00\n:,\\") {
				return d.invalid(key, "%q is not a plain absolute path below /", p)
			}
		}
	}
	for _, p := range slices.Concat(d.Host.Trees, d.Host.Copy) {
		if forbidden(p) {
			return d.invalid("host", "%s is never part of a template", p)
		}
	}
	for _, pattern := range d.Host.Etc {
		if _, err := path.Match(pattern, ""); err != nil || path.Clean("/"+pattern) != "/"+pattern || pattern == "" {
			return d.invalid("host.etc", "%q is not a path or pattern below /etc", pattern)
		}
		if !strings.ContainsAny(pattern, "*?[") && forbidden("/etc/"+pattern) {
			return d.invalid("host.etc", "/etc/%s is never part of a template", pattern)
		}
	}
	for key := range d.Env {
		if key == "" || strings.ContainsAny(key, "=\x00") {
			return d.invalid("env", "%q is not a variable name", key)
		}
	}
	_, err := parseFind(d.Python.Find)
	if err != nil {
		return d.invalid("python.find", "%v", err)
	}
	return nil
}

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

// loadDefinitions reads the embedded definitions and lets those in dir replace them or add to them.
func loadDefinitions(dir string) (map[string]*Definition, error) {
	found := map[string]*Definition{}
	embedded, err := fs.Sub(defaults, "defaults")
	if err != nil {
		return nil, err
	}
	for _, from := range []struct {
		files  fs.FS
		prefix string
	}{{embedded, builtIn}, {os.DirFS(dir), dir + "/"}} {
		if err := loadFrom(from.files, from.prefix, found); err != nil {
			return nil, err
		}
	}
	for _, d := range found {
		if _, err := chain(found, d.Name); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func loadFrom(files fs.FS, prefix string, into map[string]*Definition) error {
	names, err := fs.Glob(files, "*.toml")
	if err != nil {
		return err
	}
	source := map[string]string{}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "%s%s: cannot be read", prefix, name)
		}
		d, err := Parse(prefix+name, text, func(beside string) ([]byte, error) {
			data, err := fs.ReadFile(files, beside)
			if errors.Is(err, fs.ErrNotExist) { // a definition of one's own may use the built-in locks
				data, err = defaults.ReadFile("defaults/" + beside)
			}
			return data, err
		})
		if err != nil {
			return err
		}
		if other, twice := source[d.Name]; twice {
			return d.invalid("name", "%q is also defined by %s", d.Name, other)
		}
		source[d.Name], into[d.Name] = d.source, d
	}
	return nil
}

// chain is a definition and everything it is made from, the root of it first.
func chain(all map[string]*Definition, name string) ([]*Definition, error) {
	var links []*Definition
	for at := all[name]; at != nil; at = all[at.From] {
		if slices.Contains(links, at) {
			return nil, at.invalid("from", "%s is made from itself", at.Name)
		}
		links = append(links, at)
		if at.From == "" {
			break
		}
		if all[at.From] == nil {
			return nil, at.invalid("from", "there is no template %q; there are %s", at.From, strings.Join(sortedKeys(all), ", "))
		}
	}
	slices.Reverse(links)
	return links, nil
}

// merged is what a chain says together.
func merged(links []*Definition) *Definition {
	all := &Definition{Env: map[string]string{}, User: "user"}
	for _, d := range links {
		all.Name, all.source, all.Description = d.Name, d.source, cmp.Or(d.Description, all.Description)
		all.User, all.Workdir = cmp.Or(d.User, all.User), cmp.Or(d.Workdir, all.Workdir)
		all.Sudo = cmp.Or(d.Sudo, all.Sudo)
		all.Limits = LimitsDefinition{
			CPUs: cmp.Or(d.Limits.CPUs, all.Limits.CPUs), Memory: cmp.Or(d.Limits.Memory, all.Limits.Memory),
			Pids: cmp.Or(d.Limits.Pids, all.Limits.Pids), Disk: cmp.Or(d.Limits.Disk, all.Limits.Disk),
			OpenFiles: cmp.Or(d.Limits.OpenFiles, all.Limits.OpenFiles),
		}
		maps.Copy(all.Env, d.Env)
		all.Host.Trees = append(all.Host.Trees, d.Host.Trees...)
		all.Host.Hide = append(all.Host.Hide, d.Host.Hide...)
		if len(d.Python.Find) > 0 {
			all.Python.Find = d.Python.Find
		}
		if len(d.Python.Find) > 0 || d.Python.Packages != "" {
			all.Python.Optional = d.Python.Optional
		}
		all.Python.Preload = append(all.Python.Preload, d.Python.Preload...)
		all.Python.Warmup = strings.TrimLeft(all.Python.Warmup+"\n"+d.Python.Warmup, "\n")
	}
	return all
}

func (d *LimitsDefinition) limits() Limits {
	return Limits{CPUs: d.CPUs, MemoryBytes: int64(d.Memory), Pids: d.Pids, DiskBytes: int64(d.Disk), OpenFiles: d.OpenFiles}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

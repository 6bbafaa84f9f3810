package config

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Auth says who may come in.
type Auth struct {
	Anonymous bool `toml:"anonymous"` // whoever comes without a key is the local admin's tenant, on this machine
	// Everywhere lets people in without a key who come from other machines: everybody who reaches the address may run
	// whatever they like.
	Everywhere bool `toml:"anonymous_everywhere"`
	// AdminKeyFile holds the local admin's key where the operator chooses it, as a mounted secret does; empty: the first start makes one.
	AdminKeyFile string `toml:"admin_key_file"`
}

// Images says which container images sandboxes may start from and how they come here.
type Images struct {
	Map          map[string]string   `toml:"map"`                 // pattern of an image's name → template that stands for it; an empty one: none does
	Mirrors      map[string][]string `toml:"mirrors"`             // registry → where its images are asked for first
	Insecure     []string            `toml:"insecure_registries"` // that may speak plain HTTP or have any certificate
	DockerConfig string              `toml:"docker_config"`       // Docker's config file, whose logins the local admin's pulls use; empty: the server's user's
	MaxBytes     Size                `toml:"max_bytes"`           // of one image, unpacked
	MaxFiles     int                 `toml:"max_files"`           // of one image
	PullTimeout  time.Duration       `toml:"pull_timeout"`
	MaxTenant    Size                `toml:"max_tenant_bytes"` // of all images and builds of a tenant; zero: as much as there is
	// MaxTenantFiles is how many files all images of a tenant have together, unless MaxTenant is zero.
	MaxTenantFiles int `toml:"max_tenant_files"`
}

// Storage says what sandboxes may see of this host's disks, and what of them stays free.
type Storage struct {
	Reserve       Size     `toml:"reserve"`         // that stays free on the file system of the data directory; zero: 5 %, but 1 to 4 GiB and at most 10 %
	HostPaths     []string `toml:"host_paths"`      // that may be mounted, each with all below it: /data, or /scratch:rw to be written
	MaxTenantSize Size     `toml:"max_tenant_size"` // of all disks, volumes and snapshots of a tenant; zero: half of that file system
	VolumeSize    Size     `toml:"volume_size"`     // of a named volume that says none
	MaxVolumeSize Size     `toml:"max_volume_size"` // the largest that a volume may say; zero: volume_size, or 10 GiB if that is more
}

// codeInterpreter is the template that stands for OpenSandbox's own image and for Python's.
const codeInterpreter = "code-interpreter"

// defaultMap lets a newcomer's first sandbox start without a registry. Images with another userland, such as Alpine's, are
// not among them.
func defaultMap() map[string]string {
	m := map[string]string{
		"opensandbox/code-interpreter": codeInterpreter, "opensandbox/code-interpreter:*": codeInterpreter,
		"*/opensandbox/code-interpreter": codeInterpreter, "*/opensandbox/code-interpreter:*": codeInterpreter,
		"python:latest": codeInterpreter, "python:slim": codeInterpreter,
		// The image of agent-sandbox's own examples, whose server in the sandbox is one of ours here.
		"python-runtime-sandbox": "python", "python-runtime-sandbox:*": "python",
		"*/python-runtime-sandbox": "python", "*/python-runtime-sandbox:*": "python",
	}
	for _, version := range []string{"3", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"} {
		m["python:"+version], m["python:"+version+"-slim"] = codeInterpreter, codeInterpreter
	}
	return m
}

// insecure is the word by which OpenSandbox's server is started without keys.
func insecure(src Source) bool {
	text, ok := src.Env("OPENSANDBOX_INSECURE_SERVER")
	return ok && strings.EqualFold(strings.TrimSpace(text), "yes")
}

func (c Config) validateAuth() error {
	if c.Auth.AdminKeyFile != "" && !filepath.IsAbs(c.Auth.AdminKeyFile) {
		return fmt.Errorf("auth.admin_key_file %q is not an absolute path", c.Auth.AdminKeyFile)
	}
	if !c.Auth.Anonymous || c.Auth.Everywhere {
		return nil
	}
	for name, at := range map[string]string{"listen": c.Listen, "tls.listen": c.TLSListen(), "agent_sandbox.listen": c.AgentSandboxListen()} {
		host, _, _ := net.SplitHostPort(at) // validated
		if ip := net.ParseIP(host); at == "" || host == "localhost" || ip != nil && ip.IsLoopback() {
			continue
		}
		return fmt.Errorf("%s %q without keys: everybody who reaches this address could run whatever they like; "+
			"listen on 127.0.0.1, or say auth.anonymous_everywhere = true (%s) as well", name, at, EnvName("auth.anonymous_everywhere"))
	}
	if c.TLS.Domain != "" && c.TLS.Listen == TLSOff {
		return fmt.Errorf("tls.listen = %s says that a proxy passes on requests of others, who would need no key: say auth.anonymous_everywhere = true (%s) as well",
			TLSOff, EnvName("auth.anonymous_everywhere"))
	}
	return nil
}

func (i Images) validate() error {
	if i.DockerConfig != "" && !filepath.IsAbs(i.DockerConfig) {
		return fmt.Errorf("images.docker_config %q is not an absolute path", i.DockerConfig)
	}
	if i.MaxFiles < 0 || i.MaxTenantFiles < 0 {
		return errors.New("images.max_files and images.max_tenant_files cannot be negative")
	}
	if i.PullTimeout < 0 {
		return fmt.Errorf("images.pull_timeout cannot be negative: %v", i.PullTimeout)
	}
	return nil
}

func (s Storage) validate() error {
	for _, text := range s.HostPaths {
		path := strings.TrimSuffix(strings.TrimSuffix(text, ":rw"), ":ro")
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("storage.host_paths: %q is not an absolute path without detours; write /data, or /data:rw to let sandboxes write there", text)
		}
	}
	return nil
}

// pairs reads a=b,c=d.
func pairs(text string, each func(key, value string)) error {
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		key, value, ok := strings.Cut(part, "=")
		if !ok || strings.TrimSpace(key) == "" {
			return fmt.Errorf("%q: write it as NAME=VALUE,NAME=VALUE", part)
		}
		each(strings.TrimSpace(key), strings.TrimSpace(value))
	}
	return nil
}

// setMap adds to what a weaker source has said.
func setMap(m *map[string]string, text string) error {
	all := maps.Clone(*m)
	if all == nil {
		all = map[string]string{}
	}
	if err := pairs(text, func(k, v string) { all[k] = v }); err != nil {
		return err
	}
	*m = all
	return nil
}

// setLists gives a name that is repeated all of its values.
func setLists(m *map[string][]string, text string) error {
	all := map[string][]string{}
	if err := pairs(text, func(k, v string) { all[k] = append(all[k], v) }); err != nil {
		return err
	}
	*m = all
	return nil
}

// mapText is a map as it is written in the environment.
func mapText(v reflect.Value) string {
	var parts []string
	for _, key := range v.MapKeys() {
		values, ok := v.MapIndex(key).Interface().([]string)
		if !ok {
			values = []string{v.MapIndex(key).String()}
		}
		for _, value := range values {
			parts = append(parts, key.String()+"="+value)
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

func firstError(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

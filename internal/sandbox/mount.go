package sandbox

import (
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/covehq/cove/internal/fault"
)

// What a mount may be called. A target travels to the sandbox's first process in a field of fixed size.
const (
	maxMounts = 16
	maxTarget = 247
	maxSource = 1 << 10
)

// kept are the places inside that are the driver's own.
var kept = []string{"/proc", "/dev", "/sys", "/run/cove"}

// CheckMounts refuses mounts that are wrong whatever the server allows. A driver whose own process has more rights than the
// server asks again.
func CheckMounts(mounts []Mount) error {
	if len(mounts) > maxMounts {
		return fault.New(fault.Invalid, "%d mounts are too many; at most %d are possible", len(mounts), maxMounts)
	}
	for i, m := range mounts {
		if err := m.check(); err != nil {
			return err
		}
		for _, other := range mounts[:i] {
			if inside(m.Target, other.Target) || inside(other.Target, m.Target) {
				return fault.New(fault.Invalid, "the mounts at %s and %s lie in each other; choose targets that do not", other.Target, m.Target)
			}
		}
	}
	return nil
}

func (m Mount) check() error {
	if err := checkTarget(m.Target); err != nil {
		return err
	}
	switch m.Kind {
	case MountHost:
		if !plainPath(m.Source) || len(m.Source) > maxSource {
			return fault.New(fault.Invalid, "the host path %.100q is not a plain absolute path", m.Source)
		}
		if m.Create {
			return fault.New(fault.Invalid, "a host path is not made by a sandbox: make %.100q on the server, or use a volume", m.Source)
		}
	case MountVolume:
		if err := CheckVolumeName(m.Source); err != nil {
			return err
		}
	case MountData:
		if err := m.checkData(); err != nil {
			return err
		}
	default:
		return fault.New(fault.Invalid, "unknown kind of mount %.40q: use %s or %s", m.Kind, MountHost, MountVolume)
	}
	if m.SubPath != "" && (!plainPath("/"+m.SubPath) || len(m.SubPath) > maxSource) {
		return fault.New(fault.Invalid, "the sub path %.100q is not a plain relative path", m.SubPath)
	}
	return nil
}

var dataName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// checkData holds what is said of datasets to what the server says itself: one directory, whole and read-only.
func (m Mount) checkData() error {
	if !dataName.MatchString(m.Source) || !m.ReadOnly || m.Create || m.SubPath != "" {
		return fault.New(fault.Invalid, "the directory of datasets %.100q is mounted whole and read-only, by a name of letters, digits, '_' and '-'", m.Source)
	}
	return nil
}

func checkTarget(target string) error {
	if !plainPath(target) || target == "/" || len(target) > maxTarget {
		return fault.New(fault.Invalid, "%.100q is no place for a mount: it needs an absolute path of at most %d bytes, without '..', and not / itself", target, maxTarget)
	}
	for _, own := range kept {
		if inside(target, own) || inside(own, target) {
			return fault.New(fault.Invalid, "nothing can be mounted at %s: %s is the sandbox's own", target, own)
		}
	}
	return nil
}

// plainPath is absolute and has no other way to be written.
func plainPath(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && utf8.ValidString(p) && !strings.ContainsFunc(p, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// inside tells whether a path is a directory or lies below it.
func inside(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

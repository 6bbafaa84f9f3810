package template

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	userID   = 1000
	userHome = "/home/user"
)

// layer is a directory being filled: what one definition adds to each tree of the template.
type layer struct {
	dir      string
	targets  []string // of the template's trees
	hidden   []string // paths of host trees that are not seen inside
	rootMode fs.FileMode
	warnings []string
}

// slot is the layer's own directory for one tree.
func (l *layer) slot(target string) string {
	return filepath.Join(l.dir, "trees", "@"+strings.ReplaceAll(strings.Trim(target, "/"), "/", "@"))
}

// place is where a path inside lies in this layer.
func (l *layer) place(inside string) string {
	best := "/"
	for _, target := range l.targets {
		if within(target, inside) && len(target) > len(best) {
			best = target
		}
	}
	return filepath.Join(l.slot(best), strings.TrimPrefix(inside, best))
}

// mountPoint makes the directory that a tree is mounted on: it lies in the tree around it.
func (l *layer) mountPoint(target string) error {
	if target == "/" {
		return nil
	}
	others := slices.DeleteFunc(slices.Clone(l.targets), func(t string) bool { return t == target })
	outer := &layer{dir: l.dir, targets: others, rootMode: l.rootMode}
	return outer.mkdir(target)
}

// mkdir makes a directory and those above it as they should look inside: like the host's where the host's is seen,
// else as a fresh system has them.
func (l *layer) mkdir(inside string) error {
	if inside != "/" {
		if err := l.mkdir(path.Dir(inside)); err != nil {
			return err
		}
	}
	at := l.place(inside)
	if info, err := os.Lstat(at); err == nil {
		if info.IsDir() {
			return nil
		}
		return fmt.Errorf("%s is not a directory", inside)
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil { // the slot itself
		return err
	}
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	mode, owner := l.look(inside)
	return own(at, owner, mode)
}

func (l *layer) look(inside string) (fs.FileMode, int) {
	switch {
	case inside == "/root":
		return l.rootMode, 0
	case inside == "/tmp", inside == "/var/tmp":
		return 0o777 | fs.ModeSticky, 0
	case within(userHome, inside):
		return 0o755, userID
	default:
		return 0o755, 0
	}
}

func own(at string, owner int, mode fs.FileMode) error {
	if err := os.Lchown(at, owner, owner); err != nil {
		return err
	}
	if mode&fs.ModeSymlink != 0 {
		return nil
	}
	return os.Chmod(at, mode)
}

// write makes a file of our own.
func (l *layer) write(inside string, content []byte, mode fs.FileMode) error {
	if err := l.mkdir(path.Dir(inside)); err != nil {
		return err
	}
	at := l.place(inside)
	if err := os.RemoveAll(at); err != nil {
		return err
	}
	if err := os.WriteFile(at, content, 0o600); err != nil {
		return err
	}
	owner := 0
	if within(userHome, inside) {
		owner = userID
	}
	return own(at, owner, mode)
}

// link makes a symbolic link.
func (l *layer) link(inside, target string) error {
	if err := l.mkdir(path.Dir(inside)); err != nil {
		return err
	}
	at := l.place(inside)
	if err := os.RemoveAll(at); err != nil {
		return err
	}
	if err := os.Symlink(target, at); err != nil {
		return err
	}
	return os.Lchown(at, 0, 0)
}

// hide makes a directory of a lower layer look empty.
func (l *layer) hide(inside string) error {
	if err := l.mkdir(inside); err != nil {
		return err
	}
	return setOpaque(l.place(inside))
}

// whiteout hides one file of a lower layer.
func (l *layer) whiteout(inside string) error {
	at := l.place(inside)
	if _, err := os.Lstat(at); err == nil {
		return nil // replaced by our own already
	}
	if err := l.mkdir(path.Dir(inside)); err != nil {
		return err
	}
	return makeWhiteout(at)
}

// never are the parts of a host that no template contains, whatever a definition says. A second line: only what
// everybody may read is copied at all.
var never = []*regexp.Regexp{
	regexp.MustCompile(`^/etc/(g?shadow.*|passwd.*|group.*|sub[ug]id.*|sudoers.*|doas\.conf|ssh|machine-id|environment|hostid|krb5\.keytab|security|NetworkManager|wpa_supplicant.*|wireguard|openvpn|letsencrypt|docker|kubernetes|cloud|netrc)(/|$)`),
	regexp.MustCompile(`^/etc/(ssl/private|pki/tls/private|pki/nssdb|apt/auth\.conf.*|pam.*|cron.*|systemd|fstab|crypttab|mtab|resolv\.conf|hosts|hostname|ld\.so\.preload)(/|$)`),
	regexp.MustCompile(`^/(root|home|boot|dev|proc|sys|run|tmp|mnt|media|var/(run|log|spool|mail|tmp|backups|crash))(/|$)`),
	regexp.MustCompile(`^/var/lib/(docker|containerd|cloud|private|systemd|NetworkManager|sudo|lxc|libvirt|kubelet|snapd)(/|$)`),
	regexp.MustCompile(`(^|/)(\.ssh|\.aws|\.gnupg|\.netrc|\.docker|\.kube|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519))(/|$)`),
}

func forbidden(inside string) bool {
	return slices.ContainsFunc(never, func(re *regexp.Regexp) bool { return re.MatchString(inside) })
}

var credentials = regexp.MustCompile(`PRIVATE KEY-----|://[^/\s:@"']+:[^/\s@"']+@`)

const largestChecked = 8 << 20

// copyTree copies a file or directory of the host to the same path inside: only what everybody may read, without
// special files, keys and passwords. It follows a link only where the link's target would not be seen inside.
func (l *layer) copyTree(host string, visible func(string) bool) error {
	if forbidden(host) {
		return nil
	}
	info, err := os.Lstat(host)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	switch mode := info.Mode(); {
	case mode.IsDir():
		if mode.Perm()&0o005 != 0o005 {
			return nil
		}
		if err := l.mkdir(host); err != nil {
			return err
		}
		entries, err := os.ReadDir(host)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := l.copyTree(path.Join(host, e.Name()), visible); err != nil {
				return err
			}
		}
		return nil
	case mode&fs.ModeSymlink != 0:
		return l.copyLink(host, visible)
	case mode.IsRegular():
		return l.copyFile(host, host)
	default:
		return nil
	}
}

func (l *layer) copyLink(host string, visible func(string) bool) error {
	to, err := os.Readlink(host)
	if err != nil {
		return err
	}
	absolute := to
	if !path.IsAbs(to) {
		absolute = path.Join(path.Dir(host), to)
	}
	real, err := filepath.EvalSymlinks(host)
	switch {
	case err != nil: // dangling on the host too
		return nil
	case visible(absolute) && visible(real):
		return l.link(host, to)
	case forbidden(real):
		return nil
	}
	if info, err := os.Stat(real); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	return l.copyFile(real, host)
}

func (l *layer) copyFile(host, inside string) error {
	f, err := os.Open(host)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o004 == 0 {
		return nil
	}
	content, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	if len(content) <= largestChecked && credentials.Match(content) {
		l.warnings = append(l.warnings, host+" was left out: it looks like it holds a key or a password")
		return nil
	}
	if err := l.write(inside, content, info.Mode().Perm()&0o755); err != nil {
		return err
	}
	return os.Chtimes(l.place(inside), time.Time{}, info.ModTime())
}

// whiteoutPrivate hides what not everybody on the host may read below dir: root inside a sandbox is mapped to the
// owner of these files, so that their mode alone would not keep it out.
func (l *layer) whiteoutPrivate(dir string) error {
	return filepath.WalkDir(dir, func(at string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if slices.Contains(l.hidden, at) {
			return fs.SkipDir
		}
		if e.Type()&fs.ModeSymlink != 0 || at == dir {
			return nil
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		perm, regular := info.Mode().Perm(), info.Mode().IsRegular()
		if regular && perm&0o004 != 0 || info.IsDir() && perm&0o005 == 0o005 {
			return nil
		}
		if err := l.whiteout(at); err != nil {
			return err
		}
		if info.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
}

// digestTree is over names, types, modes, owners and contents; times do not count. The seal is over everything, the
// digest leaves out bytecode: how often an object was used while it was compiled shows in it, so no two are alike.
func digestTree(dir string) (digest, seal string, err error) {
	some, all := sha256.New(), sha256.New()
	err = filepath.WalkDir(dir, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		content, err := contentDigest(at, info)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		line := fmt.Appendf(nil, "%q %s %d %s\n", rel, info.Mode(), ownerOf(info), content)
		all.Write(line)
		if filepath.Ext(at) != ".pyc" {
			some.Write(line)
		}
		return nil
	})
	return hex.EncodeToString(some.Sum(nil)), hex.EncodeToString(all.Sum(nil)), err
}

func contentDigest(at string, info fs.FileInfo) (string, error) {
	switch mode := info.Mode(); {
	case mode.IsDir():
		return fmt.Sprint(isOpaque(at)), nil
	case mode&fs.ModeSymlink != 0:
		return os.Readlink(at)
	case !mode.IsRegular():
		return "whiteout", nil
	}
	f, err := os.Open(at)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return hex.EncodeToString(sum.Sum(nil)), err
}

// digestOf is over the JSON of a value.
func digestOf(value any) string {
	var text bytes.Buffer
	if err := json.NewEncoder(&text).Encode(value); err != nil {
		panic(err) // only our own plain structs come here
	}
	sum := sha256.Sum256(text.Bytes())
	return hex.EncodeToString(sum[:])
}

package template

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// systemLinks are directories on old hosts and links into /usr on new ones.
var systemLinks = []string{"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}

// emptyDirs are what a program expects to find; /dev, /proc and /run are mounted over.
var emptyDirs = []string{
	"/dev", "/proc", "/run", "/sys", "/mnt", "/media", "/opt", "/srv", "/root", "/tmp", userHome, "/etc", "/etc/apt/apt.conf.d",
	"/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/usr/local/share", "/usr/local/include", "/usr/local/etc", "/usr/local/src",
	"/var/tmp", "/var/log/apt", "/var/cache/apt/archives/partial", "/var/cache/debconf", "/var/lib/apt/lists/partial", "/var/lib/misc",
	"/var/spool", "/var/mail", "/var/opt", "/var/local", "/var/backups",
}

// skeleton makes the root of a file tree with nobody's identity in it.
func (b *build) skeleton(l *layer) error {
	for _, dir := range emptyDirs {
		if err := l.mkdir(dir); err != nil {
			return err
		}
	}
	links := map[string]string{"/var/run": "/run", "/var/lock": "/run/lock", "/etc/mtab": "/proc/self/mounts"}
	for _, name := range systemLinks {
		info, err := os.Lstat(name)
		if err != nil {
			continue // not on this host
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			if err := l.mountPoint(name); err != nil {
				return err
			}
			continue
		}
		if links[name], err = os.Readlink(name); err != nil {
			return err
		}
	}
	for name, target := range links {
		if err := l.link(name, target); err != nil {
			return err
		}
	}
	return b.identities(l)
}

// systemNames are the accounts that packages expect. Any other account of the host says who uses it.
var (
	systemUsers = strings.Fields(`root daemon bin sys sync games man lp mail news uucp proxy www-data backup list irc gnats _apt nobody
		systemd-network systemd-resolve systemd-timesync systemd-coredump messagebus dbus tss adm shutdown halt operator ftp`)
	systemGroups = strings.Fields(`root daemon bin sys adm tty disk lp mail news uucp man proxy kmem dialout fax voice cdrom floppy tape sudo
		wheel audio dip www-data backup operator list irc src gnats shadow utmp video sasl plugdev staff games users nogroup nobody
		systemd-journal systemd-network systemd-resolve systemd-timesync systemd-coredump input sgx kvm render crontab messagebus dbus _ssh mem lock ftp`)
)

func (b *build) identities(l *layer) error {
	var passwd, group, shadow strings.Builder
	for _, u := range hostAccounts("/etc/passwd", systemUsers) {
		home, shell := "/nonexistent", "/usr/sbin/nologin"
		if u.name == "root" {
			home, shell = "/root", "/bin/bash"
		}
		fmt.Fprintf(&passwd, "%s:x:%d:%d::%s:%s\n", u.name, u.id, u.group, home, shell)
		fmt.Fprintf(&shadow, "%s:*:19000:0:99999:7:::\n", u.name)
	}
	fmt.Fprintf(&passwd, "user:x:%d:%d::%s:/bin/bash\n", userID, userID, userHome)
	fmt.Fprint(&shadow, "user:*:19000:0:99999:7:::\n")
	shadowGroup := 0
	for _, g := range hostAccounts("/etc/group", systemGroups) {
		members := ""
		if g.name == "sudo" && b.all.Sudo != nil && *b.all.Sudo {
			members = "user"
		}
		fmt.Fprintf(&group, "%s:x:%d:%s\n", g.name, g.id, members)
		if g.name == "shadow" {
			shadowGroup = g.id
		}
	}
	fmt.Fprintf(&group, "user:x:%d:\n", userID)
	for name, content := range map[string]string{
		"/etc/passwd": passwd.String(), "/etc/group": group.String(), "/etc/hostname": "sandbox\n",
		"/etc/hosts":       "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
		"/etc/resolv.conf": "nameserver " + b.store.options.Nameserver + "\noptions edns0\n",
	} {
		if err := l.write(name, []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := l.write("/etc/shadow", []byte(shadow.String()), 0o640); err != nil {
		return err
	}
	return os.Chown(l.place("/etc/shadow"), 0, shadowGroup)
}

// homeOf is where one of the two users that a definition knows lives.
func homeOf(user string) string {
	if user == "root" {
		return "/root"
	}
	return userHome
}

// fillHome makes a definition's working directory. Where it makes root the user, root's home gets what was prepared in the
// other user's.
func (b *build) fillHome(l *layer, i int, below []*built) error {
	d := b.links[i]
	if d.Workdir != "" && d.Workdir != userHome {
		if err := l.mkdir(d.Workdir); err != nil {
			return err
		}
		if merged(b.links[:i+1]).User != "root" {
			if err := os.Lchown(l.place(d.Workdir), userID, userID); err != nil {
				return err
			}
		}
	}
	if d.User != "root" {
		return nil
	}
	for _, made := range below {
		from := (&layer{dir: made.dir, targets: b.targets}).place(userHome)
		if err := l.copyHome(from, "/root"); err != nil {
			return err
		}
	}
	return nil
}

// copyHome copies directories and regular files of a layer's home.
func (l *layer) copyHome(from, to string) error {
	return filepath.WalkDir(from, func(at string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		inside := to + strings.TrimPrefix(at, from)
		switch {
		case e.IsDir():
			return l.mkdir(inside)
		case !e.Type().IsRegular():
			return nil
		}
		content, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		return l.write(inside, content, 0o644)
	})
}

// forgetOwners drops the host's dpkg-statoverrides for accounts that the template does not have: dpkg refuses to do
// anything with them.
func forgetOwners(l *layer) error {
	const overrides = "/var/lib/dpkg/statoverride"
	text, err := os.ReadFile(l.place(overrides))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	known := func(file, name string) bool {
		accounts, err := os.ReadFile(l.place(file))
		return err == nil && strings.Contains("\n"+string(accounts), "\n"+name+":") || strings.HasPrefix(name, "#")
	}
	var kept strings.Builder
	for line := range strings.Lines(string(text)) { // owner group mode path
		if fields := strings.Fields(line); len(fields) >= 4 && known("/etc/passwd", fields[0]) && known("/etc/group", fields[1]) {
			kept.WriteString(line)
		}
	}
	return l.write(overrides, []byte(kept.String()), 0o644)
}

type account struct {
	name      string
	id, group int
}

// hostAccounts are those of the wanted names that the host has as system accounts, with the host's numbers, so that
// files in /usr keep their owners' names. root and nobody are always there.
func hostAccounts(file string, wanted []string) []account {
	accounts := []account{{"root", 0, 0}}
	if f, err := os.Open(file); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Split(lines.Text(), ":")
			if len(fields) < 4 || !slices.Contains(wanted, fields[0]) || fields[0] == "root" {
				continue
			}
			id, err := strconv.Atoi(fields[2])
			if err != nil || id <= 0 || id >= 1000 && id != nobodyID {
				continue
			}
			group, err := strconv.Atoi(fields[3])
			if err != nil || group >= 1000 {
				group = nobodyID // also where the file has no such field
			}
			accounts = append(accounts, account{fields[0], id, group})
		}
	}
	if !slices.ContainsFunc(accounts, func(a account) bool { return a.id == nobodyID }) {
		accounts = append(accounts, account{"nobody", nobodyID, nobodyID})
	}
	return accounts
}

const nobodyID = 65534

// caBundles is where distributions keep the certificates they trust.
var caBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/cert.pem",
}

// expand fills in what depends on the host.
func expand(text string) string {
	bundle := caBundles[0]
	for _, name := range caBundles {
		if _, err := os.Stat(name); err == nil {
			bundle = name
			break
		}
	}
	return strings.ReplaceAll(text, "${CA_BUNDLE}", bundle)
}

// Tools are the programs that people expect inside and a template takes from the host; with the Debian package.
var Tools = map[string]string{"bash": "bash", "git": "git", "curl": "curl", "ps": "procps", "tar": "tar", "less": "less"}

// MissingTools are those of Tools that /usr/bin and /bin of this host lack.
func MissingTools() []string {
	var missing []string
	for _, tool := range sortedKeys(Tools) {
		if !slices.ContainsFunc([]string{"/usr/bin", "/bin"}, func(dir string) bool {
			_, err := exec.LookPath(filepath.Join(dir, tool))
			return err == nil
		}) {
			missing = append(missing, tool)
		}
	}
	return missing
}

func missingTools() []string {
	var warnings []string
	for _, tool := range MissingTools() {
		warnings = append(warnings, fmt.Sprintf("%s is missing on this host and so in every sandbox: apt install %s", tool, Tools[tool]))
	}
	return warnings
}

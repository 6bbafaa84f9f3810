package native_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func dataMount(name string) sandbox.Mount {
	return sandbox.Mount{Kind: sandbox.MountData, Source: name, Target: "/datasets", ReadOnly: true}
}

// datasets are what a server keeps for two sessions: one file of two names, as hard links.
func (m *ownMaker) datasets(t *testing.T) (mine string) {
	t.Helper()
	root := filepath.Join(m.dir, "server/datasets")
	must(t, os.MkdirAll(root+"/sessions/ses_mine", 0o755), os.MkdirAll(root+"/sessions/ses_other", 0o755), os.Chmod(filepath.Join(m.dir, "server"), 0o700))
	must(t, os.WriteFile(root+"/blob", []byte("#!/bin/sh\necho run\n"), 0o444), os.Chmod(root+"/blob", 0o555))
	must(t, os.Link(root+"/blob", root+"/sessions/ses_mine/data.csv"), os.Link(root+"/blob", root+"/sessions/ses_other/theirs"))
	return root + "/sessions/ses_mine"
}

func TestS4_87_D2_DatasetsAreSeenReadOnly(t *testing.T) {
	m := newMaker(t)
	dir := m.datasets(t)
	b := m.start(t, mounts(dataMount("ses_mine")))
	defer b.stop()
	if got := b.root("cat /datasets/data.csv; stat -c %u:%g:%h /datasets/data.csv; ls -A /datasets /datasets/.. | grep -e csv -e theirs -e ses_"); got !=
		"#!/bin/sh\necho run\n65534:65534:3\ndata.csv" {
		t.Errorf("root sees %q", got)
	}
	for claim, line := range map[string]string{
		"write": "echo x >> /datasets/data.csv", "truncate": "truncate -s 0 /datasets/data.csv", "make a file": "touch /datasets/new", "make a device": "mknod /datasets/null c 1 3",
		"remove": "rm -f /datasets/data.csv", "rename": "mv /datasets/data.csv /datasets/x", "chmod": "chmod 777 /datasets/data.csv", "chown": "chown 0 /datasets/data.csv",
		"run it": "/datasets/data.csv", "link it": "ln /datasets/data.csv /tmp/linked", "change its time": "touch /datasets/data.csv",
		"remount": "mount -o remount,rw,exec /datasets", "see another session's": "cat /datasets/../ses_other/theirs", "set an attribute": "setfattr -n user.a -v b /datasets/data.csv",
		"map it to write": `python3 -c 'import mmap,os; mmap.mmap(os.open("/datasets/data.csv", os.O_RDWR), 0)'`,
	} {
		if a := b.exec(agentapi.ExecParams{Argv: []string{"bash", "-c", line}, User: "root"}); a.end.ExitCode == 0 {
			t.Errorf("root could %s: %s", claim, a.stdout)
		}
	}
	must(t, os.Link(filepath.Join(m.dir, "server/datasets/blob"), dir+"/later"))
	if got := b.root("ls /datasets"); got != "data.csv\nlater" {
		t.Errorf("after a file came: %q", got)
	}
	must(t, os.Remove(dir+"/later"))
	if got := b.root("ls /datasets"); got != "data.csv" {
		t.Errorf("after it went: %q", got)
	}
}

func TestDatasetsNeedTheServersOwnDirectory(t *testing.T) {
	m := newMaker(t)
	dir := m.datasets(t)
	above := filepath.Dir(dir)
	must(t, os.Symlink("/etc", above+"/ses_link"), os.WriteFile(above+"/ses_file", nil, 0o644))
	must(t, os.Mkdir(above+"/ses_alice", 0o755), os.Chown(above+"/ses_alice", alice, alice))
	must(t, os.Mkdir(above+"/ses_open", 0o755), os.Chmod(above+"/ses_open", 0o777))
	m.refused(t, "a link", fault.Denied, "link", dataMount("ses_link"))
	m.refused(t, "a file", fault.Denied, "file", dataMount("ses_file"))
	m.refused(t, "somebody else's directory", fault.Denied, "not the server's", dataMount("ses_alice"))
	m.refused(t, "one that all may write", fault.Denied, "not the server's", dataMount("ses_open"))
	m.refused(t, "one that is not there", fault.NotFound, "not there", dataMount("ses_none"))
	for _, name := range []string{"", "..", "../../../../etc", "ses_mine/..", "a b", strings.Repeat("a", 65)} {
		m.refused(t, "the name "+name, fault.Invalid, "", dataMount(name))
	}
	writable := dataMount("ses_mine")
	writable.ReadOnly = false
	m.refused(t, "to write", fault.Invalid, "read-only", writable)
	must(t, os.Mkdir(above+"/ses_proc", 0o755), unix.Mount("proc", above+"/ses_proc", "proc", 0, ""))
	defer unix.Unmount(above+"/ses_proc", unix.MNT_DETACH)
	m.refused(t, "what the kernel says", fault.Denied, "", dataMount("ses_proc"))
	must(t, os.Mkdir(above+"/ses_mount", 0o755), unix.Mount("tmpfs", above+"/ses_mount", "tmpfs", 0, "mode=755"))
	defer unix.Unmount(above+"/ses_mount", unix.MNT_DETACH)
	m.refused(t, "a mount", fault.Denied, "mount", dataMount("ses_mount"))
	// The server may change what lies above: no link is followed there either.
	must(t, os.Rename(filepath.Dir(above), filepath.Dir(above)+"-moved"), os.Symlink(filepath.Dir(above)+"-moved", filepath.Dir(above)))
	m.refused(t, "a link above", fault.Denied, "link", dataMount("ses_mine"))
}

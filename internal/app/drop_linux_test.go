package app_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv("COVE_TEST_DROP") != "" {
		os.Exit(dropAndLook())
	}
	pgtest.Main(m)
}

func TestARootServerEndsWithoutPrivilegeInAnyThread(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "COVE_TEST_DROP=1")
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "CGO_ENABLED=0") {
		t.Skip("this test binary has cgo, as with -race; run with CGO_ENABLED=0")
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// dropAndLook drops privilege while there are several threads and reads what the kernel says of each, and of a program
// that is started afterwards.
func dropAndLook() int {
	stop := make(chan struct{})
	defer close(stop)
	for range 4 {
		go func() { runtime.LockOSThread(); <-stop }()
	}
	if err := app.DropPrivilege(); err != nil {
		fmt.Println(err)
		return 1
	}
	files, _ := filepath.Glob("/proc/self/task/*/status")
	texts := map[string]string{}
	for _, f := range files {
		b, _ := os.ReadFile(f)
		texts[f] = string(b)
	}
	child, err := exec.Command("cat", "/proc/self/status").Output()
	if err != nil {
		fmt.Println("start a program:", err)
		return 1
	}
	texts["child"] = string(child)
	failed := 0
	for name, text := range texts {
		for _, want := range []string{"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000", "NoNewPrivs:\t1"} {
			if !strings.Contains(text, want) {
				fmt.Printf("%s has no %q\n", name, want)
				failed = 1
			}
		}
	}
	if len(files) < 4 {
		fmt.Println("only", len(files), "threads")
		failed = 1
	}
	return failed
}

func TestAServerBecomesSomebodyWhoOwnsNothingElse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	data := t.TempDir()
	t.Setenv("SUDO_UID", "")
	if uid := app.ServerUID(data); uid == 0 || uid < 1<<16 {
		t.Errorf("a server of root's is uid %d", uid)
	}
	t.Setenv("SUDO_UID", "1234")
	t.Setenv("SUDO_GID", "1234")
	if uid := app.ServerUID(data); uid != 1234 {
		t.Errorf("a server started by sudo is uid %d", uid)
	}
	state := filepath.Join(data, "server")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(state, 4321, 4321); err != nil {
		t.Fatal(err)
	}
	if uid := app.ServerUID(data); uid != 4321 {
		t.Errorf("a server with files of uid 4321 became uid %d", uid)
	}
}

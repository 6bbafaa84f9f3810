package e2e_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// The commands that need real sandboxes, as people type them; internal/cli has the scripts of the others.
func TestCommandLine(t *testing.T) {
	// Templates are built and removed here, so not in the folder that all tests share; base alone is quickly made.
	s := makeServer(t, "COVE_SANDBOX_DEFAULT_TEMPLATE=base")
	t.Cleanup(s.close)
	if err := os.RemoveAll(filepath.Join(s.dir, "templates")); err != nil {
		t.Fatal(err)
	}
	// As a data directory usually is: the server becomes another user, who sees nothing of root's.
	if err := os.Chmod(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s.start(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Setenv("COVE_DATA_DIR", s.dir)
			env.Setenv("PATH", filepath.Dir(binary.path)+":"+os.Getenv("PATH"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"status": exitStatus},
	})
}

// exitStatus CODE COMMAND… runs a command and wants exactly this exit code.
func exitStatus(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var failed *exec.ExitError
	if err := ts.Exec(args[1], args[2:]...); errors.As(err, &failed) {
		got = failed.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

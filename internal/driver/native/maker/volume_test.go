package maker_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/template"
)

func TestWhoCommandsRunAs(t *testing.T) {
	image := &template.Image{UID: -1, GID: -1}
	for user, want := range map[string][2]int{"": {0, 0}, "root": {0, 0}, "1234": {1234, 0}, "1234:55": {1234, 55}, "1234:0": {1234, 0}} {
		if uid, gid, ok := maker.CommandIDs(&template.Template{User: user, Image: image}); !ok || uid != want[0] || gid != want[1] {
			t.Errorf("%q: %d:%d %t", user, uid, gid, ok)
		}
	}
	for _, user := range []string{"app", "1234:app", "70000", "-1", "1234:70000"} {
		if uid, gid, ok := maker.CommandIDs(&template.Template{User: user, Image: image}); ok {
			t.Errorf("%q: %d:%d", user, uid, gid)
		}
	}
}

// TestAVolumeThatIsWaitedFor can be looked at meanwhile, and whoever waits can leave.
func TestAVolumeThatIsWaitedFor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("volumes lie in a directory of root's")
	}
	v, err := maker.OpenVolumes(filepath.Join(t.TempDir(), "volumes"))
	if err != nil {
		t.Fatal(err)
	}
	path, err := v.Path("tenant", "work")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	held, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := unix.Flock(int(held.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	use := func(turn func()) (leave func() error) {
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan error, 1)
		go func() { over <- v.Use(ctx, path, turn) }()
		return func() error { cancel(); return <-over }
	}
	turn := make(chan struct{})
	first := use(func() { close(turn) })
	<-turn
	second := use(func() { t.Error("two have the turn") })
	if got, err := v.Describe("tenant", "work"); err != nil || got.InUse != 0 {
		t.Errorf("%+v %v", got, err)
	}
	for _, leave := range []func() error{second, first} {
		if err := leave(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

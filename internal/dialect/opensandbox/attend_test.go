package opensandbox_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// links are the connections to agents, which a test cuts.
type links struct{ all []net.Conn }

func (d *pausable) Dial(ctx context.Context, id string) (net.Conn, error) {
	conn, err := d.Driver.Dial(ctx, id)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.links.all = append(d.links.all, conn)
	return conn, nil
}

func (d *pausable) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.links.all {
		conn.Close()
	}
	d.links.all = nil
}

// A driver of volumes that are names. Of what a sandbox is given, host paths are never there.

func (d *pausable) Volumes(context.Context, string) (all []sandbox.Volume, _ error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(d.volumes)) {
		all = append(all, sandbox.Volume{Name: name})
	}
	return all, nil
}

func (d *pausable) MakeVolume(_ context.Context, _ string, v sandbox.Volume) (sandbox.Volume, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.volumes[v.Name] {
		return v, fault.New(fault.Conflict, "there is one")
	}
	if d.volumes == nil {
		d.volumes = map[string]bool{}
	}
	d.volumes[v.Name] = true
	return v, nil
}

func (d *pausable) RemoveVolume(_ context.Context, _, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusal != nil {
		return d.refusal
	}
	delete(d.volumes, name)
	return nil
}

// refuseVolumes lets no volume be removed until it is told otherwise.
func (d *pausable) refuseVolumes() (change func(error)) {
	change = func(err error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.refusal = err
	}
	change(fault.New(fault.Unavailable, "not now"))
	return change
}

func (d *pausable) Start(ctx context.Context, r sandbox.StartRequest) error {
	for _, m := range r.Mounts {
		d.mu.Lock()
		there := m.Kind == sandbox.MountVolume && (m.Create || d.volumes[m.Source])
		d.mu.Unlock()
		if !there {
			return fault.New(fault.NotFound, "%s is not there", m.Source)
		}
	}
	r.Mounts = nil
	return d.Driver.Start(ctx, r)
}

func (w *world) volumes() []sandbox.Volume {
	w.t.Helper()
	all, err := w.manager.Volumes(w.t.Context(), w.who())
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

const waiting = `{"image":{"uri":"python"},"entrypoint":["sh","-c","while [ ! -e go ]; do sleep 0.01; done; exit 3"]}`

func TestAnEntrypointIsWatchedThoughItsConnectionBreaks(t *testing.T) {
	for name, disturb := range map[string]func(w *world, id string) error{
		"a connection that breaks": func(w *world, _ string) error { w.driver.cut(); return nil },
		"a pause and a resume of others": func(w *world, id string) error {
			_, paused := w.manager.Pause(w.t.Context(), w.who(), id, sandbox.PauseSpec{})
			w.driver.cut()
			_, resumed := w.manager.Resume(w.t.Context(), w.who(), id, 0)
			return errors.Join(paused, resumed)
		},
		"a pause before the server came": func(w *world, id string) error {
			_, paused := w.manager.Pause(w.t.Context(), w.who(), id, sandbox.PauseSpec{})
			w.again()
			_, resumed := w.manager.Resume(w.t.Context(), w.who(), id, 0)
			return errors.Join(paused, resumed)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			id := w.ask("POST", "/v1/sandboxes", waiting).json(t)["id"].(string)
			if err := disturb(w, id); err != nil {
				t.Fatal(err)
			}
			client, err := w.manager.Agent(t.Context(), w.who(), id)
			if err != nil {
				t.Fatal(err)
			}
			w.exec(client, "touch go")
			w.eventually("its end is seen", func() bool { state, _ := w.state(id); return state == "Failed" })
		})
	}
}

const counting = `{"image":{"uri":"python"},"entrypoint":["sh","-c","echo begun >> begun; while [ ! -e go ]; do sleep 0.01; done; exit 3"]}`

func TestAnEntrypointIsStartedAgainAfterAPauseThatEndedIt(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"by another dialect":                  func(*world) {},
		"and the server came while it lasted": func(w *world) { w.again() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			id := w.ask("POST", "/v1/sandboxes", counting).json(t)["id"].(string)
			begun := func() string {
				client, err := w.manager.Agent(t.Context(), w.who(), id)
				if err != nil {
					t.Fatal(err)
				}
				_, content, err := client.Read(t.Context(), agentapi.ReadParams{Path: "begun"})
				if err != nil {
					return "" // not yet
				}
				defer content.Close()
				text, err := io.ReadAll(content)
				if err != nil {
					t.Fatal(err)
				}
				return string(text)
			}
			w.eventually("it has begun", func() bool { return begun() == "begun\n" })
			if _, err := w.manager.Pause(t.Context(), w.who(), id, sandbox.PauseSpec{Cold: true}); err != nil {
				t.Fatal(err)
			}
			between(w)
			if _, err := w.manager.Resume(t.Context(), w.who(), id, 0); err != nil {
				t.Fatal(err)
			}
			w.eventually("it has begun again", func() bool { return begun() == "begun\nbegun\n" })
			client, err := w.manager.Agent(t.Context(), w.who(), id)
			if err != nil {
				t.Fatal(err)
			}
			w.exec(client, "touch go")
			w.eventually("its end is seen", func() bool { state, _ := w.state(id); return state == "Failed" })
		})
	}
}

const withVolume = `"volumes":[{"name":"a","mountPath":"/m","pvc":{"claimName":"mine","deleteOnSandboxTermination":true}}]`

func TestVolumesEndWithTheirSandboxHoweverItEnds(t *testing.T) {
	for name, end := range map[string]func(w *world, id string) error{
		"deleted": func(w *world, id string) error { w.ask("DELETE", "/v1/sandboxes/"+id, ""); return nil },
		"killed by others": func(w *world, id string) error {
			_, err := w.manager.Kill(w.t.Context(), w.who(), id)
			return err
		},
		"expired": func(w *world, id string) error {
			_, err := w.manager.Expire(w.t.Context(), w.who(), id)
			return err
		},
		"ended while no server was there": func(w *world, id string) error {
			w.Server.Close()
			w.api.Close()
			_, err := w.manager.Kill(w.t.Context(), w.who(), id)
			w.again() // and its tenant does not call
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			id := w.create(withVolume)
			if all := w.volumes(); len(all) != 1 || all[0].Name != "mine" {
				t.Fatalf("%v", all)
			}
			if err := end(w, id); err != nil {
				t.Fatal(err)
			}
			w.eventually("its volume is gone", func() bool { return len(w.volumes()) == 0 })
		})
	}
}

func TestAVolumeThatCouldNotBeRemovedIsLater(t *testing.T) {
	w := newWorld(t)
	id := w.create(withVolume)
	w.again(func(c *opensandbox.Config) { c.Sweep = 10 * time.Millisecond })
	refuse := w.driver.refuseVolumes()
	w.ask("DELETE", "/v1/sandboxes/"+id, "")
	if len(w.volumes()) != 1 {
		t.Fatal("the driver removed it")
	}
	refuse(nil)
	w.eventually("its volume is gone", func() bool { return len(w.volumes()) == 0 })
}

func TestAVolumeOfACreateThatFailedIsGone(t *testing.T) {
	w := newWorld(t)
	got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["/none"],`+withVolume+`}`)
	if got.status == http.StatusAccepted {
		t.Fatalf("%d %s", got.status, got.body)
	}
	w.eventually("its volume is gone", func() bool { return len(w.volumes()) == 0 })
}

func TestMountsThatAreNotThere(t *testing.T) {
	w := newWorld(t)
	w.create(`"volumes":[{"name":"a","mountPath":"/m","pvc":{"claimName":"theirs","storage":"1Gi"}}]`)
	for volumes, code := range map[string]string{
		`{"name":"a","mountPath":"/m","pvc":{"claimName":"none","createIfNotExists":false}}`: "VOLUME::PVC_NOT_FOUND",
		`{"name":"a","mountPath":"/m","host":{"path":"/none"}}`:                              "VOLUME::HOST_PATH_NOT_FOUND",
		`{"name":"a","mountPath":"/m","pvc":{"claimName":"theirs","createIfNotExists":false}},
			{"name":"b","mountPath":"/n","host":{"path":"/none"}}`: "VOLUME::HOST_PATH_NOT_FOUND",
	} {
		got := w.ask("POST", "/v1/sandboxes", `{"image":{"uri":"python"},`+idle+`,"volumes":[`+volumes+`]}`)
		wantFault(t, got, http.StatusBadRequest, code)
	}
}

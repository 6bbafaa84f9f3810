package cluster_test

import (
	"context"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/covehq/cove/client"
)

// A server that is killed takes the streams through it along, and nothing else: the next one has the sandbox with all that is in it.
func TestClusterAServerIsKilledWithAStreamingRun(t *testing.T) {
	w := newWorld(t)
	s := w.serve(settings{Pool: 2})
	w.warm(2)
	sb := s.create(client.CreateRequest{})
	if _, err := sb.Run(t.Context(), client.RunRequest{Code: "kept = 41"}); err != nil {
		t.Fatal(err)
	}
	running := follow(t.Context(), sb, client.ExecRequest{Command: "while :; do echo tick; sleep 0.1; done"})
	running.line(t, 10*time.Second)
	s.end(syscall.SIGKILL)
	if err := running.end(t, 10*time.Second); err == nil {
		t.Error("the stream ended well although its server was killed")
	}
	s.start()
	again, err := s.Get(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	out, err := again.Run(t.Context(), client.RunRequest{Code: "kept + 1"})
	if err != nil || out.Text() != "42" {
		t.Errorf("the kernel says %+v, %v", out, err)
	}
	if err := again.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.noOrphans(s)
}

// The leader is killed while sandboxes are being made through it. The other server takes what it left, makes sandboxes, fills the pool, and no Pod
// is left that is nobody's.
func TestClusterTheLeaderIsKilledMidCreate(t *testing.T) {
	w := newWorld(t)
	database := w.database()
	leader := w.serve(settings{Name: "first", Pool: 3, Database: database, Replicas: 2})
	w.warm(3)
	other := w.serve(settings{Name: "second", Pool: 3, Database: database, Replicas: 2})
	if holder := w.kubectl("get", "lease", "-n", w.namespace, "cove-leader", "-o", "jsonpath={.spec.holderIdentity}"); holder != "first" {
		t.Fatalf("the leader is %s", holder)
	}
	kept := leader.create(client.CreateRequest{})
	if _, err := kept.Run(t.Context(), client.RunRequest{Code: "kept = 41"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	asked, told := make(chan struct{}, 6), make(chan *client.Sandbox, 6)
	for range 6 { // more than wait: some are claimed, others are made
		wg.Go(func() {
			asked <- struct{}{}
			sb, err := leader.Create(ctx, client.CreateRequest{})
			switch {
			case err == nil:
				told <- sb
			case sb != nil:
				t.Errorf("%v comes with the sandbox %s", err, sb.ID)
			}
		})
	}
	for range 6 {
		<-asked
	}
	w.until(30*time.Second, "sandbox that is told of while others are made", func() bool {
		claimed := 0
		for _, p := range w.pods() {
			if p.State == "claimed" {
				claimed++
			}
		}
		return claimed > 2 && len(told) > 0
	})
	leader.end(syscall.SIGKILL)
	cancel()
	wg.Wait()
	close(told)
	if len(told) == 6 {
		t.Fatal("nothing was being made any more")
	}

	w.until(90*time.Second, "the sandbox at the other server", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		out, err := other.Sandbox(kept.ID).Run(ctx, client.RunRequest{Code: "kept + 1"})
		return err == nil && out.Text() == "42"
	})
	for sb := range told { // whoever was told of a sandbox has one
		w.until(time.Minute, "sandbox "+sb.ID+" at the other server", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			out, err := other.Sandbox(sb.ID).Exec(ctx, client.ExecRequest{Command: "echo alive"})
			return err == nil && out.Stdout == "alive\n"
		})
	}
	made := other.create(client.CreateRequest{})
	says(t, made, "echo alive", "alive")
	w.until(time.Minute, "another leader", func() bool {
		return w.kubectl("get", "lease", "-n", w.namespace, "cove-leader", "-o", "jsonpath={.spec.holderIdentity}") == "second"
	})
	w.noOrphans(other)
	w.warm(3)
}

// database is a fresh one of the cluster's Postgres.
func (w *world) database() string {
	w.t.Helper()
	w.cluster("start", "postgres")
	const server = "postgres://cove@10.251.0.2:5432/"
	name := strings.ReplaceAll(w.namespace, "-", "_")
	conn, err := pgx.Connect(w.t.Context(), server+"postgres?sslmode=disable")
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(w.t.Context(), "CREATE DATABASE "+name); err != nil {
		w.t.Fatal(err)
	}
	return server + name + "?sslmode=disable"
}

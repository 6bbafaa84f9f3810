package agent

import (
	"bytes"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

func TestInterruption_Over(t *testing.T) {
	began := time.Now()
	for name, c := range map[string]struct {
		waited, used time.Duration
		over         bool
	}{
		"a kernel that computes on":                {2 * time.Second, 2 * time.Second, true},
		"a kernel that is hardly run":              {19 * time.Second, time.Second, false},
		"a kernel that does nothing":               {20 * time.Second, 0, true},
		"a kernel with many threads is as patient": {time.Second, 8 * time.Second, false},
		"many threads, later":                      {2 * time.Second, 16 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := interruption{began: began, cpu: time.Minute}
			if got := p.over(began.Add(c.waited), time.Minute+c.used); got != c.over {
				t.Errorf("over: %v", got)
			}
		})
	}
}

func TestReadStat_CPU(t *testing.T) {
	before, ok := readStat(os.Getpid())
	if !ok {
		t.Fatal("no stat of this process")
	}
	for begun := time.Now(); ; {
		now, _ := readStat(os.Getpid())
		if now.cpu > before.cpu {
			return
		}
		if time.Since(begun) > time.Minute {
			t.Fatalf("the processor time stays at %v", now.cpu)
		}
	}
}

func TestRemainder_AfterDeadline(t *testing.T) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range pair {
		if conns[i], err = agentapi.DescriptorConn(fd); err != nil {
			t.Fatal(err)
		}
		defer conns[i].Close()
	}
	want := bytes.Repeat([]byte("last frames "), 5000)
	if _, err := conns[1].Write(want); err != nil {
		t.Fatal(err)
	}
	conns[0].SetDeadline(time.Now().Add(-time.Second))
	got, err := io.ReadAll(&remainder{conn: conns[0]}) // the other end stays open, as one held by a child does
	if !bytes.Equal(got, want) || !os.IsTimeout(err) {
		t.Errorf("%d of %d bytes, %v", len(got), len(want), err)
	}
}

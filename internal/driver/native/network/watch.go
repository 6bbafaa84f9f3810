package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// protection makes the table ours alone, so that `nft flush ruleset`, which distributions run to reload their firewall,
// passes it by; and makes it outlive us, so that a crash of ours opens nothing. A variable for tests.
var protection uint32 = tableOwned | tablePersists

const nftablesGroup = 7 // NFNLGRP_NFTABLES

// watcher puts the table back when somebody deletes it, on kernels that cannot protect it. Sandboxes are unguarded for
// the moment in between.
type watcher struct {
	events *os.File
	done   chan struct{}
}

func (n *Network) watch() (*watcher, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("watch tables: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (nftablesGroup - 1)}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("watch tables: %w", err)
	}
	w := &watcher{events: os.NewFile(uintptr(fd), "nftables events"), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.run(n)
	}()
	return w, nil
}

func (w *watcher) run(n *Network) {
	buf := make([]byte, 64<<10)
	for {
		size, err := w.events.Read(buf)
		switch {
		case errors.Is(err, unix.ENOBUFS): // we missed some, so look
		case err != nil:
			return
		case !deletesTable(buf[:size]):
			continue
		}
		if err := n.rebuild(); err != nil {
			n.log.Error("network rules are gone", "error", err)
		}
	}
}

func (w *watcher) stop() {
	if w != nil {
		_ = w.events.Close()
		<-w.done
	}
}

func deletesTable(b []byte) bool {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return true // not what we know: look
		}
		if binary.NativeEndian.Uint16(b[4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE {
			return true
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return false
}

// rebuild writes the table again if it is gone.
func (n *Network) rebuild() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	tables, err := coveTables()
	if err != nil {
		return err
	}
	if contains(tables, n.table()) {
		return nil
	}
	n.log.Warn("somebody deleted the network rules; writing them again")
	return n.write(false, 0)
}

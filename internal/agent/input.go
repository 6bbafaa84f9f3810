package agent

import (
	"os"
	"sync"
	"syscall"
	"time"
)

// maxInput is how many bytes wait for a process that does not read; then the client waits.
const maxInput = 256 << 10

// input is a process's stdin. Bytes are queued, so that the goroutine that reads a client hears signals and a hang-up
// while the process does not read; a writer exists only while bytes wait.
type input struct {
	file *os.File
	tty  bool

	mu      sync.Mutex
	changed *sync.Cond
	queue   [][]byte
	size    int
	writing bool
	ending  bool // close once the queue is empty
	closed  bool
	lost    bool   // bytes that came were not written
	wake    func() // of the reader that waits for room
}

func newInput(file *os.File, tty bool) *input {
	in := &input{file: file, tty: tty}
	in.changed = sync.NewCond(&in.mu)
	return in
}

// write queues p and waits while the queue is full; false when the client left meanwhile. For a process that reads no
// more the bytes are dropped, as a closed pipe would.
func (in *input) write(l *link, p []byte) bool {
	if in == nil {
		return true // nobody asked for stdin: dropped, as by a closed pipe
	}
	for !in.offer(p) {
		if !in.waitRoom(l) {
			return false
		}
	}
	return true
}

func (in *input) offer(p []byte) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed || in.ending {
		in.lost = in.lost || len(p) > 0
		return true
	}
	if in.size > 0 && in.size+len(p) > maxInput {
		return false
	}
	in.queue = append(in.queue, append([]byte(nil), p...))
	in.size += len(p)
	if !in.writing {
		in.writing = true
		go in.pump() // ends with the queue, or with the file that close closes
	}
	return true
}

func (in *input) pump() {
	in.mu.Lock()
	defer in.mu.Unlock()
	for len(in.queue) > 0 && !in.closed {
		p := in.queue[0]
		in.queue = in.queue[1:]
		in.mu.Unlock()
		_, err := in.file.Write(p)
		in.mu.Lock()
		in.size -= len(p)
		if err != nil {
			in.lost = true
			in.shut()
		}
		if in.wake != nil {
			in.wake()
		}
		in.changed.Broadcast()
	}
	in.writing = false
	if in.ending {
		in.shut()
	}
	in.changed.Broadcast()
}

// waitRoom returns when there is room, or false when the client hung up. It waits in the poller for either: a hang-up
// is an event on the socket, and room is told by a read deadline in the past.
func (in *input) waitRoom(l *link) bool {
	conn, ok := l.conn.(interface {
		syscall.Conn
		SetReadDeadline(time.Time) error
	})
	if !ok {
		return in.blockForRoom()
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return in.blockForRoom()
	}
	in.mu.Lock()
	in.wake = func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) } // a closed one is awake
	in.mu.Unlock()
	hungUp := false
	// It fails when woken, which is how it is told of room, or when the client is gone, which hungUp says.
	_ = raw.Read(func(fd uintptr) bool {
		hungUp = peerGone(int(fd))
		return hungUp || in.hasRoom()
	})
	in.mu.Lock()
	in.wake = nil
	_ = conn.SetReadDeadline(time.Time{})
	in.mu.Unlock()
	return !hungUp
}

func (in *input) hasRoom() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.size == 0 || in.closed || in.size <= maxInput/2
}

func (in *input) blockForRoom() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.size > maxInput/2 && !in.closed {
		in.changed.Wait()
	}
	return true
}

// peerGone reports whether the other side of a socket has closed it.
func peerGone(fd int) bool {
	fds := []pollfd{{fd: int32(fd), events: pollRDHUP}}
	var now syscall.Timespec
	n, err := poll(fds, &now)
	return err != nil || n > 0 && fds[0].revents&(pollRDHUP|pollHUP|pollErr) != 0
}

// flush waits until everything queued was written. A process that has ended since, and has taken all of it, is no failure.
func (in *input) flush() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.writing {
		in.changed.Wait()
	}
	if in.lost {
		return errInputClosed
	}
	return nil
}

// end closes stdin after what is queued. On a terminal that is the end-of-file character: the terminal stays.
func (in *input) end() {
	if in == nil {
		return
	}
	if in.tty {
		in.offer([]byte{4})
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ending = true
	if !in.writing {
		in.shut()
	}
}

func (in *input) close() {
	if in == nil {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.shut()
}

// shut closes the file; mu is held. A terminal's file belongs to its output.
func (in *input) shut() {
	if in.closed {
		return
	}
	in.closed = true
	in.lost = in.lost || len(in.queue) > 0
	in.queue = nil
	if !in.tty {
		in.file.Close()
	}
	in.changed.Broadcast()
}

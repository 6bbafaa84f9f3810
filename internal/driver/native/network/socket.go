package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// attrs is a netlink attribute list under construction. The common libraries build a tree of small slices per
// message; this appends, which is what keeps a policy change near the cost of the system call itself.
type attrs []byte

func (a *attrs) put(typ uint16, data ...byte) {
	*a = binary.NativeEndian.AppendUint16(*a, uint16(4+len(data)))
	*a = binary.NativeEndian.AppendUint16(*a, typ)
	*a = append(*a, data...)
	for len(*a)%4 != 0 {
		*a = append(*a, 0)
	}
}

func (a *attrs) text(typ uint16, s string)      { a.put(typ, append([]byte(s), 0)...) }
func (a *attrs) number(typ uint16, v uint32)    { a.put(typ, binary.NativeEndian.AppendUint32(nil, v)...) }
func (a *attrs) bigNumber(typ uint16, v uint32) { a.put(typ, binary.BigEndian.AppendUint32(nil, v)...) }

func (a *attrs) nest(typ uint16, fill func(*attrs)) {
	start := len(*a)
	a.put(typ | unix.NLA_F_NESTED)
	fill(a)
	binary.NativeEndian.PutUint16((*a)[start:], uint16(len(*a)-start))
}

// eachAttr calls f for every attribute of a list and stops quietly at a malformed one.
func eachAttr(b []byte, f func(typ uint16, data []byte)) {
	for len(b) >= 4 {
		size := int(binary.NativeEndian.Uint16(b))
		if size < 4 || size > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:size])
		b = b[min((size+3)&^3, len(b)):]
	}
}

// message is one netlink request; what names it in errors.
type message struct {
	what  string
	typ   uint16
	flags uint16
	body  attrs // fixed header first, then attributes
}

// reply is one message from the kernel that is neither an error nor an acknowledgement.
type reply struct {
	typ  uint16
	body []byte
}

// socket is a netlink socket for requests that the kernel answers before the send returns: that is how rtnetlink
// and nfnetlink treat everything but dumps, so many requests travel in one send and reading never blocks.
type socket struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf []byte
}

// batchRoom is the send buffer asked for: a rebuilt table with thousands of elements is a single datagram.
const batchRoom = 16 << 20

func dial(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("bind netlink socket: %w", err)
	}
	// Comforts: readable errors, short acknowledgements, room. Nothing breaks without them.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, batchRoom)
	return &socket{fd: fd, buf: make([]byte, 64<<10)}, nil
}

func (s *socket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}

// exchange sends all messages at once and returns the kernel's replies, or the first failure.
func (s *socket) exchange(msgs ...message) ([]reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.seq + 1
	var out []byte
	for _, m := range msgs {
		s.seq++
		out = binary.NativeEndian.AppendUint32(out, uint32(unix.NLMSG_HDRLEN+len(m.body)))
		out = binary.NativeEndian.AppendUint16(out, m.typ)
		out = binary.NativeEndian.AppendUint16(out, m.flags|unix.NLM_F_REQUEST)
		out = binary.NativeEndian.AppendUint32(out, s.seq)
		out = binary.NativeEndian.AppendUint32(out, 0)
		out = append(out, m.body...)
	}
	if err := s.send(out); err != nil {
		return nil, fmt.Errorf("%s: %w", msgs[0].what, err)
	}
	return s.collect(msgs, first)
}

func (s *socket) send(out []byte) error {
	for {
		err := unix.Sendto(s.fd, out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (s *socket) collect(msgs []message, first uint32) (replies []reply, failure error) {
	answered := false
	for {
		n, _, err := unix.Recvfrom(s.fd, s.buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) && !answered:
			return nil, fmt.Errorf("%s: the kernel did not answer", msgs[0].what)
		case errors.Is(err, unix.EAGAIN):
			return replies, failure
		case err != nil:
			return nil, fmt.Errorf("%s: %w", msgs[0].what, err)
		}
		for b := s.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.NLMSG_HDRLEN || size > len(b) {
				break
			}
			typ, index := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])-first
			body := b[unix.NLMSG_HDRLEN:size]
			if index < uint32(len(msgs)) {
				answered = true
				if typ != unix.NLMSG_ERROR {
					replies = append(replies, reply{typ, append([]byte(nil), body...)})
				} else if failed := asError(body, binary.NativeEndian.Uint16(b[6:])); failed != nil && failure == nil {
					failure = fmt.Errorf("%s: %w", msgs[index].what, failed)
				}
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// extAckFlag (NLM_F_ACK_TLVS) marks an acknowledgement that carries the kernel's own words.
const extAckFlag = 0x200

func asError(body []byte, flags uint16) error {
	if len(body) < 4 {
		return unix.EBADMSG
	}
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
	if errno == 0 {
		return nil
	}
	var words string
	if flags&extAckFlag != 0 && len(body) > 20 {
		eachAttr(body[20:], func(typ uint16, data []byte) {
			if typ == unix.NLMSGERR_ATTR_MSG && len(data) > 0 {
				words = string(data[:len(data)-1])
			}
		})
	}
	if words == "" {
		return errno
	}
	return fmt.Errorf("%w (%s)", errno, words)
}

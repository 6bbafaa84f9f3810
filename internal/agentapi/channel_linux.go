package agentapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// maxDescriptors bounds what one message may carry; the kernel drops and closes the rest.
const maxDescriptors = 8

// SendMessage sends one message with descriptors, which stay the caller's. conn is a SEQPACKET socket.
func SendMessage(conn *net.UnixConn, m Message, fds ...int) error {
	payload, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(payload) > MaxMessage || len(fds) > maxDescriptors {
		return &ProtocolError{fmt.Sprintf("message of %d bytes and %d descriptors is over the limit", len(payload), len(fds))}
	}
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	n, _, err := conn.WriteMsgUnix(payload, rights, nil)
	if err == nil && n != len(payload) {
		err = io.ErrShortWrite
	}
	return err
}

// ReceiveMessage waits for one message. Its descriptors are close-on-exec and the caller's to close; io.EOF is a
// channel whose other side is gone. While it waits it holds no buffer.
func ReceiveMessage(conn *net.UnixConn) (Message, []int, error) {
	size, err := nextSize(conn)
	if err != nil {
		return Message{}, nil, err
	}
	payload := make([]byte, min(size, MaxMessage))
	oob := make([]byte, syscall.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := conn.ReadMsgUnix(payload, oob) // sets MSG_CMSG_CLOEXEC
	if err != nil {
		return Message{}, nil, err
	}
	fds, err := descriptors(oob[:oobn])
	switch {
	case err != nil:
	case size > MaxMessage: // it is taken all the same: left there, it would be all that anybody ever receives
		err = &ProtocolError{fmt.Sprintf("message of %d bytes is over the limit of %d", size, MaxMessage)}
	case flags&(syscall.MSG_TRUNC|syscall.MSG_CTRUNC) != 0:
		err = &ProtocolError{"a message was cut off"}
	}
	var m Message
	if err == nil {
		m, err = DecodeMessage(payload[:n], len(fds))
	}
	if err != nil {
		CloseDescriptors(fds)
		return Message{}, nil, err
	}
	return m, fds, nil
}

// nextSize waits for a message and tells its length without taking it.
func nextSize(conn *net.UnixConn) (size int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var perr error
	err = raw.Read(func(fd uintptr) bool {
		for {
			size, _, perr = syscall.Recvfrom(int(fd), nil, syscall.MSG_PEEK|syscall.MSG_TRUNC|syscall.MSG_DONTWAIT)
			if perr != syscall.EINTR {
				return perr != syscall.EAGAIN
			}
		}
	})
	if err == nil {
		err = perr
	}
	if err == nil && size == 0 || errors.Is(err, syscall.ECONNRESET) {
		err = io.EOF
	}
	return size, err
}

// descriptors takes the descriptors out of control messages.
func descriptors(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		got, err := syscall.ParseUnixRights(&m)
		if err != nil {
			continue // credentials or the like carry no descriptors
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// CloseDescriptors closes what a message brought.
func CloseDescriptors(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// DescriptorConn makes a connection of a stream socket's descriptor and takes it over, also when it fails.
func DescriptorConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	if f == nil {
		return nil, syscall.EBADF
	}
	defer f.Close()
	return net.FileConn(f)
}

// Channel makes a channel of a SEQPACKET socket's descriptor and takes it over, also when it fails.
func Channel(fd int) (*net.UnixConn, error) {
	conn, err := DescriptorConn(fd)
	if err != nil {
		return nil, err
	}
	ch, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, &ProtocolError{"a channel is a unix socket"}
	}
	return ch, nil
}

// ReceiveDescriptors takes descriptors that come with the first byte of a stream; exactly so many, or none.
func ReceiveDescriptors(conn *net.UnixConn, want int) ([]int, error) {
	oob := make([]byte, syscall.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := conn.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return nil, err
	}
	fds, err := descriptors(oob[:oobn])
	if err == nil && (n != 1 || len(fds) != want || flags&syscall.MSG_CTRUNC != 0) {
		err = &ProtocolError{fmt.Sprintf("%d descriptors came, not %d", len(fds), want)}
	}
	if err != nil {
		CloseDescriptors(fds)
		return nil, err
	}
	return fds, nil
}

// WriteWithDescriptors sends a frame on a stream socket with descriptors beside its first byte; they stay open here.
func WriteWithDescriptors(conn *net.UnixConn, kind FrameKind, payload []byte, fds ...int) error {
	frame := make([]byte, HeaderSize+len(payload))
	PutHeader(frame, kind, len(payload))
	copy(frame[HeaderSize:], payload)
	n, _, err := conn.WriteMsgUnix(frame, syscall.UnixRights(fds...), nil)
	if err == nil && n < len(frame) {
		_, err = conn.Write(frame[n:])
	}
	return err
}

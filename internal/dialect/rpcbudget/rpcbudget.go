// Package rpcbudget counts the messages of Connect and gRPC requests against a transfer.Budget, for
// every dialect that serves them. A message counts as it comes, and then as it is unpacked.
package rpcbudget

import (
	"context"
	"io"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/covehq/cove/internal/dialect/transfer"
)

type meterKey struct{}

// Request returns r with a body that a tenant pays for. The handler must have the Interceptor.
func Request(r *http.Request, tenant string) *http.Request {
	m := &meter{ReadCloser: r.Body, memory: transfer.MemoryOf(r.Context(), tenant)}
	if compressed(r.Header) {
		m.packed = maxPacked
	}
	r = r.WithContext(context.WithValue(r.Context(), meterKey{}, m))
	r.Body = m
	return r
}

// meter counts the bytes of the message that is read and the message that is worked on.
type meter struct {
	io.ReadCloser
	memory *transfer.Memory
	stream bool  // the client sends several messages
	packed int64 // what a message may become while it is unpacked; zero: it is not compressed
	read   int64
	held   int64
}

// maxPacked is the largest message that a handler reads.
const maxPacked = 8 << 20

// compressed reports whether the messages of a request may be. They are unpacked before they can be
// counted, so the largest one is paid for.
func compressed(h http.Header) bool {
	for _, name := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if encoding := h.Get(name); encoding != "" && encoding != "identity" {
			return true
		}
	}
	return false
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.read += int64(n)
	if err := m.count(); err != nil {
		return 0, err
	}
	return n, err
}

// count returns the budget's error as Connect's, which Connect passes on as it is.
func (m *meter) count() error {
	if err := m.memory.Resize(max(0, m.read+m.packed+m.held-transfer.FreeBody)); err != nil {
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	return nil
}

// hold counts a message in place of the bytes that it came as.
func (m *meter) hold(message any) error {
	if m == nil {
		return nil
	}
	unpacked, _ := message.(proto.Message)
	m.read, m.held = 0, sizeOf(unpacked)
	if !m.stream {
		m.packed = 0 // no other message comes
	}
	return m.count()
}

// elementSize is what an element of a list takes besides its content: the header of a string.
const elementSize = 16

// sizeOf estimates what a message takes in memory.
func sizeOf(message proto.Message) int64 {
	if message == nil {
		return 0
	}
	return int64(proto.Size(message)) + elementSize*elements(message.ProtoReflect())
}

// elements counts the elements of all lists and maps in a message.
func elements(message protoreflect.Message) (n int64) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsList():
			n += int64(value.List().Len())
		case field.IsMap():
			n += int64(value.Map().Len())
		case field.Message() != nil:
			n += elements(value.Message())
		}
		return true
	})
	return n
}

// Interceptor counts the messages of requests that Request made.
type Interceptor struct{}

// WrapUnary is of connect.Interceptor.
func (Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		m, _ := ctx.Value(meterKey{}).(*meter)
		if err := m.hold(req.Any()); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient is of connect.Interceptor.
func (Interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler is of connect.Interceptor.
func (Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		m, _ := ctx.Value(meterKey{}).(*meter)
		if m != nil {
			m.stream = conn.Spec().StreamType&connect.StreamTypeClient != 0
		}
		return next(ctx, &countedConn{conn, m})
	}
}

type countedConn struct {
	connect.StreamingHandlerConn
	m *meter // nil: nothing counts
}

// Receive counts the next message. In a stream of messages the handler is done with the last one.
func (c *countedConn) Receive(message any) error {
	if c.m != nil && c.m.stream {
		c.m.read, c.m.held = 0, 0
	}
	if err := c.StreamingHandlerConn.Receive(message); err != nil {
		return err
	}
	return c.m.hold(message)
}

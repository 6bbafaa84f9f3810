package unpack

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/covehq/cove/internal/fault"
)

// stream is a tar on its way from the blob: one goroutine takes compression off, a second hashes what comes out, and whoever
// reads it writes files meanwhile. Chunks are used again, so memory is bounded whatever the layer is.
type stream struct {
	cancel context.CancelFunc
	toRead chan *chunk
	hashed chan string // the digest, once everything was read
	free   chan *chunk
	over   chan struct{} // closed when nothing is under way any more
	err    error         // of the source; set before toRead is closed

	current *chunk
	rest    []byte
}

type chunk struct {
	data  []byte
	n     int
	users atomic.Int32
}

const (
	chunkSize = 512 << 10
	chunks    = 8
)

// broken is a layer that cannot be read to its end.
type broken struct{ err error }

func (b broken) Error() string { return b.err.Error() }
func (b broken) Unwrap() error { return b.err }

var errTooLong = errors.New("the archive is longer than its files can be")

// openStream begins to read. At most bound bytes come out.
func openStream(ctx context.Context, blob io.Reader, bound int64) (*stream, error) {
	plain, closePlain, err := decompress(blob)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &stream{
		cancel: cancel, toRead: make(chan *chunk, chunks), hashed: make(chan string, 1),
		free: make(chan *chunk, chunks), over: make(chan struct{}),
	}
	for range chunks {
		s.free <- &chunk{}
	}
	toHash, hashOver := make(chan *chunk, chunks), make(chan struct{})
	go func() {
		defer close(hashOver)
		s.hash(toHash)
	}()
	go func() {
		defer close(s.over)
		s.err = s.produce(ctx, plain, bound, toHash)
		closePlain()
		close(toHash)
		<-hashOver
		close(s.toRead)
	}()
	return s, nil
}

// Magic numbers of what a layer may be compressed with, and of what it may not.
var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
	others    = map[string][]byte{"xz": {0xfd, '7', 'z', 'X', 'Z', 0}, "bzip2": []byte("BZh")}
)

// zstdWindow is the most that a decoder keeps of what it has written: as much as the tool's own highest level needs.
const zstdWindow = 128 << 20

func decompress(blob io.Reader) (plain io.Reader, done func(), err error) {
	in := bufio.NewReaderSize(blob, 256<<10)
	magic, err := in.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, fmt.Errorf("read layer: %w", err)
	}
	switch {
	case bytes.HasPrefix(magic, gzipMagic):
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, nil, unreadable(err)
		}
		return z, func() {}, nil
	case bytes.HasPrefix(magic, zstdMagic):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, nil, unreadable(err)
		}
		return z, z.Close, nil
	}
	for name, is := range others {
		if bytes.HasPrefix(magic, is) {
			return nil, nil, fault.New(fault.Invalid, "the layer is compressed with %s; layers are plain, or compressed with gzip or zstd", name)
		}
	}
	return in, func() {}, nil
}

// produce reads the source to its end.
func (s *stream) produce(ctx context.Context, plain io.Reader, bound int64, toHash chan<- *chunk) error {
	for {
		var c *chunk
		select {
		case c = <-s.free:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if c.data == nil { // a small layer needs one
			c.data = make([]byte, chunkSize)
		}
		n, err := fill(plain, c.data)
		if n > 0 {
			if bound -= int64(n); bound < 0 {
				return errTooLong
			}
			c.n = n
			c.users.Store(2)
			toHash <- c // both have room for every chunk that there is
			s.toRead <- c
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// fill reads until there is no more room. Unlike io.ReadFull it leaves an end as it is: one that comes too soon is another.
func fill(in io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var more int
		more, err = in.Read(p[n:])
		n += more
	}
	return n, err
}

func (s *stream) hash(in <-chan *chunk) {
	sum := sha256.New()
	for c := range in {
		sum.Write(c.data[:c.n])
		s.release(c)
	}
	s.hashed <- "sha256:" + hex.EncodeToString(sum.Sum(nil))
}

func (s *stream) release(c *chunk) {
	if c.users.Add(-1) == 0 {
		s.free <- c
	}
}

// Read gives the tar.
func (s *stream) Read(p []byte) (int, error) {
	if err := s.more(); err != nil {
		return 0, err
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// more sees to it that there is something to read.
func (s *stream) more() error {
	if len(s.rest) > 0 {
		return nil
	}
	if s.current != nil {
		s.release(s.current)
		s.current = nil
	}
	c, ok := <-s.toRead
	if !ok {
		if s.err != nil {
			return broken{s.err}
		}
		return io.EOF
	}
	s.current, s.rest = c, c.data[:c.n]
	return nil
}

// digest reads what follows the archive, since it is part of the layer, and gives the digest of all of it.
func (s *stream) digest() (string, error) {
	for {
		s.rest = nil
		if err := s.more(); errors.Is(err, io.EOF) {
			return <-s.hashed, nil
		} else if err != nil {
			return "", err
		}
	}
}

// explain says what is wrong with a layer that cannot be read.
func (s *stream) explain(err error) error {
	var told *fault.Error
	switch {
	case errors.As(err, &told):
		return err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, errTooLong):
		return fault.New(fault.Exhausted, "the layer is larger than the limit")
	}
	var cut broken
	if errors.As(err, &cut) {
		return unreadable(err)
	}
	return err
}

func unreadable(err error) error {
	return fault.Wrap(fault.Invalid, err, "the layer is not an archive that can be read to its end: it is broken")
}

// close ends what is under way. A source that never gives an end is the caller's to close.
func (s *stream) close() {
	s.cancel()
	for {
		select {
		case <-s.over:
			return
		case <-s.toRead:
		}
	}
}

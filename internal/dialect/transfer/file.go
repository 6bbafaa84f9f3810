package transfer

import (
	"errors"
	"io"
	"sync"
)

// copies are the buffers that files pass through: a transfer takes one, however large the file.
var copies = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// Pour copies everything.
func Pour(w io.Writer, r io.Reader) error {
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	// The bare structs hide ReaderFrom and WriterTo, which would bring buffers of their own.
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *buf)
	return err
}

// File reads a sandbox's file from wherever it is put; a place is opened when it is first read.
type File struct {
	size   int64
	open   func(offset int64) (io.ReadCloser, error)
	at     int64         // where the next read begins
	ready  io.ReadCloser // nil: none
	stands int64         // where ready does
	err    error
}

// NewFile makes one of a size; begun is its content from the beginning, and open gives it from elsewhere.
func NewFile(size int64, begun io.ReadCloser, open func(offset int64) (io.ReadCloser, error)) *File {
	return &File{size: size, ready: begun, open: open}
}

// Err is why a read failed; nil: none did.
func (f *File) Err() error { return f.err }

// Seek puts it somewhere.
func (f *File) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, errors.New("before the beginning of the file")
	}
	f.at = offset
	return offset, nil
}

func (f *File) Read(p []byte) (int, error) {
	if f.ready == nil || f.at != f.stands {
		f.Close()
		content, err := f.open(f.at)
		if err != nil {
			f.err = err
			return 0, err
		}
		f.ready = content
	}
	n, err := f.ready.Read(p)
	f.at += int64(n)
	f.stands = f.at
	if err != nil && err != io.EOF {
		f.err = err
	}
	return n, err
}

// Close lets go of what is open.
func (f *File) Close() error {
	if f.ready == nil {
		return nil
	}
	err := f.ready.Close()
	f.ready = nil
	return err
}

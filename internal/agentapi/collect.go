package agentapi

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/bits"

	"github.com/covehq/cove/internal/fault"
)

// Bounds of one collection. A path is relative to the directory that is collected.
const (
	MaxCollected     = 10_000
	MaxCollectedPath = 1024
)

// CollectParams stream every regular file below a directory, as the user who may read it. Nothing that is no regular file is
// opened, and no link is followed, the directory itself included.
type CollectParams struct {
	Path     string `json:"path"`
	User     string `json:"user,omitempty"`
	MaxBytes int64  `json:"max_bytes,omitempty"` // of one file; a larger one is told and not sent; 0: any
	MaxTotal int64  `json:"max_total,omitempty"` // of all files; one that does not fit beside those before is told and not sent; 0: any
	MaxFiles int    `json:"max_files,omitempty"` // 0: MaxCollected
	Seen     []byte `json:"seen,omitempty"`      // marks, one after the other: these files are neither told nor sent
}

// Mark stands for a file as it was at one moment, in a space that no name makes larger. Whoever makes two files with one mark,
// which takes intent, has one of their own files not collected.
type Mark [16]byte

// Mark is the same for two looks at a file to which nothing happened between them.
func (f Found) Mark() Mark {
	return MarkOf(fmt.Sprintf("%d %d %d %d %s", f.Size, f.Mod, f.Change, f.Inode, f.Path))
}

// MarkOf is FNV-1a of 128 bits. It is written out here, since every sandbox pays for what its agent links.
func MarkOf(text string) (m Mark) {
	const offsetHigh, offsetLow, prime = 0x6c62272e07bb0142, 0x62b821756295c58d, 0x13b // and 2 to the 88th
	high, low := uint64(offsetHigh), uint64(offsetLow)
	for i := range len(text) {
		low ^= uint64(text[i])
		carry, product := bits.Mul64(prime, low)
		high, low = carry+low<<24+prime*high, product
	}
	binary.BigEndian.PutUint64(m[:8], high)
	binary.BigEndian.PutUint64(m[8:], low)
	return m
}

// DiscardParams remove files that are still as they were told, and the directories that this leaves empty; the directory
// itself stays.
type DiscardParams struct {
	Path  string  `json:"path"`
	User  string  `json:"user,omitempty"`
	Files []Found `json:"files"`
}

// Discarded says how many were removed.
type Discarded struct {
	Files int `json:"files"`
}

// Found is one file of a directory that is collected, as it was before it was read.
type Found struct {
	Path   string `json:"path"` // below the directory
	Size   int64  `json:"size"`
	Mod    int64  `json:"mod"`    // modification, ns since 1970
	Change int64  `json:"change"` // change of the inode, ns since 1970
	Inode  uint64 `json:"inode"`
	// Refused says why it is not sent: it stays where it is.
	Refused string `json:"refused,omitempty"`
}

// Same says whether nothing happened to a file between two looks at it.
func (f Found) Same(g Found) bool {
	f.Refused, g.Refused = "", ""
	return f == g
}

// Collected is what an agent says at the end of a collection.
type Collected struct {
	// More says that there are files beyond MaxFiles.
	More bool `json:"more,omitempty"`
}

// Collection is a directory on its way out of the sandbox, file by file.
type Collection struct {
	link *link
	file *foundReader // the one that was told last; nil: none
	left int64        // how many bytes may come still
	end  Collected
}

// Collect begins to stream a directory; one that is not there is fault.NotFound.
func (c *Client) Collect(ctx context.Context, p CollectParams) (*Collection, error) {
	l, err := c.open(ctx, OpCollect, p)
	if err != nil {
		return nil, err
	}
	l.buf = bufio.NewReaderSize(l.conn, ChunkSize) // many small files come in one read
	l.r = NewReader(l.buf)
	if _, err := l.started(); err != nil {
		l.close()
		return nil, err
	}
	left := p.MaxTotal
	if left <= 0 {
		left = math.MaxInt64
	}
	return &Collection{link: l, left: left}, nil
}

// Discard removes what was collected and has not changed since.
func (c *Client) Discard(ctx context.Context, p DiscardParams) (Discarded, error) {
	return ask[Discarded](ctx, c, OpDiscard, p)
}

// Next is the next file and its content, which holds until Next is called again and is nil for one that is refused; io.EOF
// after the last. A content that ends with an error was not sent to its end, and the collection may go on.
func (c *Collection) Next() (Found, io.Reader, error) {
	if err := c.skip(); err != nil {
		return Found{}, nil, err
	}
	e, err := c.link.event()
	switch {
	case err != nil:
		return Found{}, nil, err
	case e.Type == EventEnd:
		return Found{}, nil, c.finish(e.End)
	case e.Type != EventFound || e.Found == nil || e.Found.Path == "" || e.Found.Size < 0:
		return Found{}, nil, c.link.fault(&ProtocolError{"a collection told something that is no file"})
	case e.Found.Refused != "":
		return *e.Found, nil, nil
	}
	c.file = &foundReader{link: c.link, room: &c.left}
	return *e.Found, c.file, nil
}

// More says, after the last file, that the directory holds files beyond what was asked for.
func (c *Collection) More() bool { return c.end.More }

// Close leaves the collection.
func (c *Collection) Close() { c.link.close() }

func (c *Collection) finish(end *End) error {
	if len(end.Value) > 0 {
		if err := json.Unmarshal(end.Value, &c.end); err != nil {
			return c.link.fault(&ProtocolError{"answer: " + err.Error()})
		}
	}
	return io.EOF
}

// skip reads over what the caller left of the file before.
func (c *Collection) skip() error {
	if c.file == nil {
		return nil
	}
	f := c.file
	c.file = nil
	if !f.over {
		_, _ = io.Copy(io.Discard, f) // a file's own failure ends that file; the connection's is told below
	}
	return f.broken
}

// foundReader reads the data frames of one file.
type foundReader struct {
	link   *link
	room   *int64 // of the whole collection
	left   int
	over   bool
	err    error // what every further read returns
	broken error // the connection cannot go on
}

func (f *foundReader) Read(p []byte) (int, error) {
	for f.left == 0 && !f.over {
		f.next()
	}
	if f.over {
		return 0, f.err
	}
	n, err := f.link.buf.Read(p[:min(len(p), f.left)])
	f.left -= n
	if err != nil && n == 0 {
		f.fail(f.link.fault(err))
		return 0, f.err
	}
	return n, nil
}

// next reads one frame header, and the whole frame where it is no data.
func (f *foundReader) next() {
	header, err := f.link.buf.Peek(HeaderSize)
	if err != nil {
		f.fail(f.link.fault(err))
		return
	}
	kind, n, err := ParseHeader(header)
	if err != nil {
		f.fail(f.link.fault(err))
		return
	}
	switch kind {
	case FrameData:
		if *f.room -= int64(n); *f.room < 0 {
			f.fail(f.link.fault(&ProtocolError{"a collection is longer than what was asked for"}))
			return
		}
		_, _ = f.link.buf.Discard(HeaderSize) // it was peeked, so it is there
		f.left = n
	case FrameEOF:
		_, _ = f.link.buf.Discard(HeaderSize)
		f.over, f.err = true, io.EOF
	default:
		f.torn()
	}
}

// torn reads why a file ended before its end.
func (f *foundReader) torn() {
	e, err := f.link.event()
	if err == nil && e.Type != EventNotice {
		err = f.link.fault(&ProtocolError{"unexpected frame among data"})
	}
	if err != nil {
		f.fail(err)
		return
	}
	f.over, f.err = true, fault.New(fault.Conflict, "%.500s", e.Message)
}

func (f *foundReader) fail(err error) { f.over, f.err, f.broken = true, err, err }

// Why a file is not sent that the client could ask for with other bounds: TooLarge is one over CollectParams.MaxBytes, NoRoom one
// that does not fit into MaxTotal.
const (
	TooLarge = "it is larger than what is kept"
	NoRoom   = "there is no room for it"
)

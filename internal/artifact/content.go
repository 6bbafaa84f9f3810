package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"sync"

	"github.com/covehq/cove/internal/fault"
)

// Content is an artifact's bytes, which are those that were kept: reading never ends well with others.
type Content interface {
	io.ReadSeekCloser
}

// Open opens an artifact of a tenant's.
func (k *Keeper) Open(ctx context.Context, tenant, id string) (Artifact, Content, error) {
	a, err := k.Get(ctx, tenant, id)
	if err != nil {
		return Artifact{}, nil, err
	}
	c, err := k.open(ctx, a)
	return a, c, err
}

// open opens a content and, unless that was done since it last changed, reads it through first: so what is wrong is said
// before anything is sent.
func (k *Keeper) open(ctx context.Context, a Artifact) (Content, error) {
	b, err := k.blobs.Open(a.Tenant, a.SHA256)
	if fault.Is(err, fault.Gone) {
		return nil, fault.Wrap(fault.Gone, err, "the content of artifact %s is gone from the server", a.ID)
	}
	if err != nil {
		return nil, err
	}
	if err := k.verify(ctx, b, a); err != nil {
		b.Close()
		return nil, err
	}
	return &content{Blob: b, artifact: a, hash: sha256.New(), inOrder: true}, nil
}

func (k *Keeper) verify(ctx context.Context, b Blob, a Artifact) error {
	mark, err := b.Mark()
	if err != nil {
		return err
	}
	ref := Ref{a.Tenant, a.SHA256}
	if k.verified.is(ref, mark) {
		return nil
	}
	sum := sha256.New()
	n, err := copyUntil(ctx, sum, b)
	if err != nil {
		return err
	}
	if n != a.Size || hex.EncodeToString(sum.Sum(nil)) != a.SHA256 {
		return damaged(a)
	}
	if _, err := b.Seek(0, io.SeekStart); err != nil {
		return err
	}
	k.verified.add(ref, mark)
	return nil
}

var errDamaged = errors.New("its SHA-256 is another")

func damaged(a Artifact) error {
	return fault.Wrap(fault.Internal, errDamaged, "the content of artifact %s is damaged on the server: it is not what was kept", a.ID)
}

func isDamaged(err error) bool { return errors.Is(err, errDamaged) }

func copyUntil(ctx context.Context, w io.Writer, r io.Reader) (n int64, err error) {
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	for {
		if ctx.Err() != nil {
			return n, context.Cause(ctx)
		}
		got, err := r.Read(*buf)
		_, _ = w.Write((*buf)[:got]) // a hash takes everything
		n += int64(got)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// content hashes what is read from the beginning to the end, and withholds the last bytes of what turns out to be wrong.
type content struct {
	Blob
	artifact Artifact
	hash     hash.Hash
	at       int64
	inOrder  bool // everything before at went through hash
}

func (c *content) Seek(offset int64, whence int) (int64, error) {
	at, err := c.Blob.Seek(offset, whence)
	if err != nil {
		return at, err
	}
	if at == 0 {
		c.hash.Reset()
		c.inOrder = true
	} else if at != c.at {
		c.inOrder = false
	}
	c.at = at
	return at, nil
}

func (c *content) Read(p []byte) (int, error) {
	n, err := c.Blob.Read(p)
	if c.inOrder {
		c.hash.Write(p[:n])
	}
	c.at += int64(n)
	if c.at > c.artifact.Size || errors.Is(err, io.EOF) && c.at < c.artifact.Size {
		return 0, damaged(c.artifact)
	}
	if c.inOrder && c.at == c.artifact.Size && hex.EncodeToString(c.hash.Sum(nil)) != c.artifact.SHA256 {
		return 0, damaged(c.artifact)
	}
	return n, err
}

// maxVerified bounds how many contents are remembered as read through.
const maxVerified = 4096

// verified remembers which contents were right, and what their blob was then.
type verified struct {
	mu    sync.Mutex
	marks map[Ref]string
}

func (v *verified) is(r Ref, mark string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.marks[r] == mark && mark != ""
}

func (v *verified) add(r Ref, mark string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.marks == nil || len(v.marks) >= maxVerified {
		v.marks = map[Ref]string{} // reading some again costs less than a list of who was first
	}
	v.marks[r] = mark
}

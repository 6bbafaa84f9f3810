package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// kindLayer is the kind of documents that say which layers a tenant has had the bytes of. Layers are shared by their
// content, but knowing the digest of one is no right to it.
const kindLayer = "image-layer"

// parallel is how many layers of one image are on their way at once.
const parallel = 3

// layer is one to bring in.
type layer struct {
	blob v1.Descriptor
	diff string
	of   string // the template that will have it
}

// layers brings in what is missing of an image and returns what all of it has, in bytes.
func (s *Service) layers(ctx context.Context, tenant, what string, b blueprint, bring func(context.Context, layer) (sandbox.Layer, error)) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	todo := make(chan layer)
	sums := make(chan sandbox.Layer)
	workers := min(parallel, len(b.layers))
	for range workers {
		go func() { // ends with ctx, or when todo is closed; its last word is waited for below
			var sum sandbox.Layer
			for l := range todo {
				got, err := bring(ctx, l)
				if err != nil {
					cancel(err)
					break
				}
				sum.Bytes += got.Bytes
				sum.Files += got.Files
			}
			sums <- sum
		}()
	}
	seen := map[string]bool{}
hand:
	for i, blob := range b.layers {
		if seen[b.diffs[i]] { // an image may have the same layer twice
			continue
		}
		seen[b.diffs[i]] = true
		select {
		case todo <- layer{blob, b.diffs[i], b.add.Name}:
		case <-ctx.Done():
			break hand
		}
	}
	close(todo)
	var total sandbox.Layer
	for range workers {
		sum := <-sums
		total.Bytes += sum.Bytes
		total.Files += sum.Files
	}
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	if onDisk(total) > s.cfg.MaxBytes {
		return 0, tooLarge(what, s.cfg.MaxBytes)
	}
	if total.Files > s.cfg.MaxFiles {
		return 0, fault.New(fault.Exhausted, "%s has %d files, and an image may have %d on this server", what, total.Files, s.cfg.MaxFiles)
	}
	return total.Bytes, nil
}

func tooLarge(what string, most int64) error {
	return fault.New(fault.Exhausted, "%s is larger than the %d MiB that an image may have on this server", what, most>>20)
}

// known is a layer that is unpacked and that the tenant has had before.
func (s *Service) known(ctx context.Context, tenant, diff string) (sandbox.Layer, bool, error) {
	if _, err := s.documents.Document(ctx, tenant, kindLayer, diff); fault.Is(err, fault.NotFound) {
		return sandbox.Layer{}, false, nil
	} else if err != nil {
		return sandbox.Layer{}, false, err
	}
	there, err := s.imager.Layers(ctx, []string{diff})
	if err != nil || len(there) == 0 {
		return sandbox.Layer{}, false, err
	}
	return there[0], true, nil
}

// maxUnpacks is how many layers a tenant may have checked and unpacked at once: one fewer than the
// maker unpacks on a host, so that another tenant's next layer does not wait.
const maxUnpacks = 3

// take unpacks a layer that the tenant has the bytes of and notes that it has had them. The bytes are looked at here before: a
// manifest can claim that any blob is any layer, so that a tenant with a wrong one would get another's; and what unpacks
// them is not believed what they are, since they may have taken it over.
func (s *Service) take(ctx context.Context, tenant, what string, l layer, blob *os.File) (sandbox.Layer, error) {
	// The place comes before the lock, so that a layer that waits for its tenant's turn delays no
	// other tenant.
	leave, err := s.place(ctx, "unpacks of "+tenant, maxUnpacks)
	if err != nil {
		return sandbox.Layer{}, err
	}
	defer leave()
	free, err := s.lock(ctx, "layer "+l.diff)
	if err != nil {
		return sandbox.Layer{}, err
	}
	defer free()
	got, err := s.unpack(ctx, tenant, what, l, blob)
	if err != nil {
		return sandbox.Layer{}, layerFailure(what, err)
	}
	return got, s.documents.PutDocument(ctx, tenant, kindLayer, l.diff, []byte("{}"))
}

func (s *Service) unpack(ctx context.Context, tenant, what string, l layer, blob *os.File) (sandbox.Layer, error) {
	if _, err := blob.Seek(0, io.SeekStart); err != nil {
		return sandbox.Layer{}, err
	}
	plain, err := s.checkDiff(ctx, what, l.diff, blob)
	if err != nil {
		return sandbox.Layer{}, err
	}
	there, err := s.imager.Layers(ctx, []string{l.diff})
	if err != nil || len(there) > 0 {
		return append(there, sandbox.Layer{})[0], err
	}
	if _, err := blob.Seek(0, io.SeekStart); err != nil {
		return sandbox.Layer{}, err
	}
	most := s.cfg.MaxBytes
	if s.cfg.MaxTenantBytes > 0 { // no more than was reserved: files with holes can have more than their archive
		most = min(most, plain)
	}
	files, settle, err := s.reserve(ctx, tenant, what, l.diff, most, mostFiles(plain, s.cfg.MaxFiles))
	if err != nil {
		return sandbox.Layer{}, err
	}
	got, err := s.imager.Unpack(ctx, sandbox.LayerRequest{DiffID: l.diff, MaxBytes: most, MaxFiles: files, For: sandbox.ImageRequest{Tenant: tenant, Name: l.of}.Claim()}, blob)
	settle(err == nil)
	return got, err
}

// mostFiles is how many files an archive of a length can have. Each has a header of 512 bytes; the
// directories on the way to it need not have one.
func mostFiles(archive int64, limit int) int {
	return int(min(int64(limit), archive/256+1000))
}

// layerFailure names the image that a driver's failure is about.
func layerFailure(what string, err error) error {
	var f *fault.Error
	if errors.As(err, &f) {
		return fault.Wrap(f.Kind, err, "a layer of %s cannot be unpacked: %s", what, f.Message)
	}
	return err
}

// checkDiff reads a layer to see that it has its digest without compression, and how long it is then.
func (s *Service) checkDiff(ctx context.Context, what, diff string, blob io.Reader) (int64, error) {
	plain, end, err := decompress(&interruptible{ctx, blob})
	if err != nil {
		return 0, fault.Wrap(fault.Invalid, err, "it is not compressed in a way that is known")
	}
	defer end()
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(plain, archiveBytes(s.cfg.MaxBytes)+1))
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case err != nil:
		return 0, fault.Wrap(fault.Invalid, err, "its compression is damaged")
	case n > archiveBytes(s.cfg.MaxBytes):
		return 0, tooLarge(what, s.cfg.MaxBytes)
	case "sha256:"+hex.EncodeToString(sum.Sum(nil)) != diff:
		return 0, fault.New(fault.Invalid, "it does not have the digest that the image's configuration gives it")
	}
	return n, nil
}

// archiveBytes is how long a tar may be whose files have so many bytes: headers and padding come on top.
func archiveBytes(files int64) int64 { return files + files/2 + 64<<20 }

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// maxWindow is how much memory a few bytes of zstd can ask for. No usual level of compression wants more than 8 MiB, and those that
// have to be asked for twice rarely more than this.
const maxWindow = 32 << 20

// decompress sees by the first bytes what it has to do.
func decompress(from io.Reader) (plain io.Reader, end func(), err error) {
	b := bufio.NewReaderSize(from, pieceBytes)
	head, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, nil, err
		}
		return z, func() { z.Close() }, nil
	case bytes.HasPrefix(head, zstdMagic):
		z, err := zstd.NewReader(b, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	}
	return b, func() {}, nil
}

// bringer brings layers of a pull in.
func (s *Service) bringer(tenant, what string, from []*source, tell func(template.PullProgress)) func(context.Context, layer) (sandbox.Layer, error) {
	return func(ctx context.Context, l layer) (sandbox.Layer, error) {
		for {
			got, here, err := s.known(ctx, tenant, l.diff)
			if err != nil {
				return sandbox.Layer{}, err
			}
			if here {
				tell(template.PullProgress{Step: template.PullKnown, Layer: l.blob.Digest.String(), Done: l.blob.Size, Total: l.blob.Size})
				return got, nil
			}
			var mine atomic.Bool
			result, err := s.share(ctx, s.blobs, tenant+"\x00"+l.blob.Digest.String(), tell, func(ctx context.Context, f *flight) (any, error) {
				mine.Store(true)
				return s.bring(ctx, tenant, what, from, l, f)
			})
			// Another pull's failure need not be ours: it may have other credentials. And its layer need not be ours: its
			// configuration may call the same blob something else.
			if got, ok := result.(sandbox.Layer); mine.Load() || ctx.Err() != nil || err == nil && ok && got.DiffID == l.diff {
				return got, err
			}
		}
	}
}

// bring downloads a layer and unpacks it.
func (s *Service) bring(ctx context.Context, tenant, what string, from []*source, l layer, f *flight) (sandbox.Layer, error) {
	name := l.blob.Digest.String()
	blob, err := s.fetch(ctx, tenant, from, l.blob, f.tell)
	if err != nil {
		return sandbox.Layer{}, explain(ctx, what, from[len(from)-1], err)
	}
	defer blob.Close()
	f.tell(template.PullProgress{Step: template.PullUnpack, Layer: name, Total: l.blob.Size})
	got, err := s.take(ctx, tenant, what, l, blob)
	if err != nil {
		if ctx.Err() == nil && !fault.Is(err, fault.Unavailable) {
			os.Remove(blob.Name()) // what is complete and of no use
		}
		return sandbox.Layer{}, fmt.Errorf("layer %s: %w", name, err)
	}
	os.Remove(blob.Name())
	f.tell(template.PullProgress{Step: template.PullDone, Layer: name, Done: l.blob.Size, Total: l.blob.Size})
	return got, nil
}

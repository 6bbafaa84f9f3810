package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/template"
)

const (
	maxAttempts = 6                      // in a row without a byte
	pieceBytes  = 256 << 10              // read and written at once
	tellEvery   = 100 * time.Millisecond // of a download
)

var errStalled = errors.New("no byte came for too long")

// backoff is how long to wait before another try: longer each time, and never as long as somebody else who waits.
func backoff(attempt int) time.Duration {
	d := min(200*time.Millisecond<<min(attempt, 6), 10*time.Second)
	return d/2 + rand.N(d/2)
}

// partFile is where a blob is until it is complete and used. Each tenant has its own: whoever could go on with what another
// has begun would have got a layer without being allowed to.
func (s *Service) partFile(tenant string, d v1.Hash) string {
	sum := sha256.Sum256([]byte(tenant))
	return filepath.Join(s.blobDir(), hex.EncodeToString(sum[:12]), d.Hex+".part")
}

// download is a blob on its way into a file.
type download struct {
	service *Service
	blob    v1.Descriptor
	file    *os.File
	have    int64
	sum     hash.Hash // of what is in the file
	tell    func(template.PullProgress)
	told    time.Time
	space   *diskspace.Meter
}

// fetch brings a blob in and returns it as a file, read to its end and checked. What an earlier try has left is gone on
// with. The caller closes the file and removes it.
func (s *Service) fetch(ctx context.Context, tenant string, from []*source, blob v1.Descriptor, tell func(template.PullProgress)) (*os.File, error) {
	part := s.partFile(tenant, blob.Digest)
	if err := os.MkdirAll(filepath.Dir(part), 0o700); err != nil {
		return nil, fmt.Errorf("%w: %w", errFile, err)
	}
	file, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errFile, err)
	}
	d := &download{service: s, blob: blob, file: file, tell: tell, space: diskspace.NewMeter(s.cfg.Space)}
	if err := d.run(ctx, from); err != nil {
		file.Close()
		var wrong *digestError
		if d.have == 0 || diskFull(err) != nil || errors.As(err, &wrong) {
			os.Remove(part) // it is empty, takes room that others need, or is of no use
		}
		return nil, err
	}
	return file, nil
}

func (d *download) run(ctx context.Context, from []*source) error {
	if err := d.readOn(ctx); err != nil {
		return err
	}
	if err := d.service.cfg.Space.Allow(d.blob.Size - d.have); err != nil {
		return fmt.Errorf("%w: %w", errFile, err)
	}
	resumed := d.have > 0
	for {
		if err := d.fill(ctx, from); err != nil {
			return err
		}
		got := "sha256:" + hex.EncodeToString(d.sum.Sum(nil))
		if got == d.blob.Digest.String() {
			d.report(true)
			return nil
		}
		wrong := &digestError{what: "layer", want: d.blob.Digest.String(), got: got}
		if !resumed { // otherwise what was there before may be what is wrong
			return wrong
		}
		resumed = false
		if err := d.restart(); err != nil {
			return err
		}
	}
}

// readOn takes what is in the file already into account.
func (d *download) readOn(ctx context.Context) error {
	info, err := d.file.Stat()
	if err != nil {
		return fmt.Errorf("%w: %w", errFile, err)
	}
	if info.Size() > d.blob.Size {
		return d.restart()
	}
	d.sum = sha256.New()
	d.have, err = io.Copy(d.sum, &interruptible{ctx, d.file})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("%w: %w", errFile, err)
	}
	return nil
}

// interruptible ends a long read of a file when nobody waits for it any more.
type interruptible struct {
	ctx  context.Context
	from io.Reader
}

func (r *interruptible) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.from.Read(p)
}

func (d *download) restart() error {
	d.sum, d.have = sha256.New(), 0
	_, err := d.file.Seek(0, io.SeekStart)
	if err == nil {
		err = d.file.Truncate(0)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errFile, err)
	}
	return nil
}

// fill downloads what is missing, in as many tries as it takes while each brings something.
func (d *download) fill(ctx context.Context, from []*source) error {
	for attempt := 0; d.have < d.blob.Size; {
		before := d.have
		err := d.try(ctx, from[0])
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			continue
		case !isPassing(err) && len(from) > 1: // this mirror does not have it, its registry may
			from = from[1:]
			continue
		case !isPassing(err):
			return err
		case d.have > before:
			attempt = 0
		default:
			attempt++
		}
		if attempt >= maxAttempts {
			if len(from) == 1 {
				return err
			}
			from, attempt = from[1:], 0
		}
		if err := sleep(ctx, d.service.pause(attempt)); err != nil {
			return err
		}
	}
	return nil
}

// isPassing reports whether another try could go better.
func isPassing(err error) bool {
	var wrong *digestError
	switch code := status(err); {
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code >= 500:
		return true
	case code != 0, errors.As(err, &wrong), errors.Is(err, errTooLong), errors.Is(err, errAddress), errors.Is(err, errPlain), errors.Is(err, errFile):
		return false
	}
	return true
}

// errFile is a failure of our own disk.
var errFile = errors.New("file of a layer")

// try asks once, for what is missing.
func (d *download) try(ctx context.Context, from *source) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := from.open(ctx, d.service.network.mayPlain(from.host)); err != nil {
		return err
	}
	watch := time.AfterFunc(d.service.stall, func() { cancel(errStalled) })
	defer watch.Stop()
	header := http.Header{}
	if d.have > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", d.have, d.blob.Size-1))
	}
	answer, err := from.get(ctx, http.MethodGet, "/v2/"+from.repository+"/blobs/"+d.blob.Digest.String(), header,
		http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable)
	if err != nil {
		return stalled(ctx, err)
	}
	defer answer.Body.Close()
	if d.have > 0 && !continues(answer, d.have) { // it knows no ranges, or something else lies there now
		if err := d.restart(); err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			return &statusError{host: from.host, status: http.StatusServiceUnavailable}
		}
	}
	if answer.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return &statusError{host: from.host, status: answer.StatusCode}
	}
	return stalled(ctx, d.copy(answer.Body, func() { watch.Reset(d.service.stall) }))
}

func stalled(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return errStalled
	}
	return err
}

// continues reports whether an answer begins where we have stopped.
func continues(answer *http.Response, at int64) bool {
	if answer.StatusCode != http.StatusPartialContent {
		return false
	}
	span, ok := strings.CutPrefix(answer.Header.Get("Content-Range"), "bytes ")
	first, _, ok2 := strings.Cut(span, "-")
	n, err := strconv.ParseInt(first, 10, 64)
	return ok && ok2 && err == nil && n == at
}

func (d *download) copy(from io.Reader, alive func()) error {
	buffer := make([]byte, pieceBytes)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			alive()
			if d.have+int64(n) > d.blob.Size {
				return errTooLong
			}
			if err := d.space.Take(int64(n)); err != nil {
				return fmt.Errorf("%w: %w", errFile, err)
			}
			if _, err := d.file.WriteAt(buffer[:n], d.have); err != nil {
				return fmt.Errorf("%w: %w", errFile, err)
			}
			d.sum.Write(buffer[:n])
			d.have += int64(n)
			d.report(false)
		}
		switch {
		case err == io.EOF && d.have < d.blob.Size:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

func (d *download) report(always bool) {
	if now := time.Now(); always || now.Sub(d.told) >= tellEvery {
		d.told = now
		d.tell(template.PullProgress{Step: template.PullDownload, Layer: d.blob.Digest.String(), Done: d.have, Total: d.blob.Size})
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

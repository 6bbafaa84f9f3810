package build

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// linkFor is how long an upload link is good: the SDKs give an upload an hour.
const linkFor = 2 * time.Hour

// halfUploaded ends the name of a file that is on its way.
const halfUploaded = ".part"

var hashForm = regexp.MustCompile(`^[A-Za-z0-9]{16,128}$`)

// files keeps uploaded archives, by tenant and by the name that the client gives them: a hash of what they are copied from.
// It is not one of their bytes, so nobody's archive is taken for another tenant's.
type files struct {
	dir            string
	maxOne, maxAll int64
	space          diskspace.Check
	log            *slog.Logger

	mu      sync.Mutex
	uploads map[string]*lane // by tenant
}

// maxUploads is how many uploads of a tenant go on at once; more wait. What is on its way is not among the files that old
// ones make room for.
const maxUploads = 4

// uploadFor is how long one may take, which is what the SDKs give it.
const uploadFor = time.Hour

// maxKept is how many archives of a tenant are kept: each takes an inode, and makeRoom lists them
// all after every upload.
const maxKept = 4096

// lane holds the uploads of one tenant.
type lane struct {
	places   chan struct{}
	users    int        // that hold a place or wait for one
	removing sync.Mutex // held while old archives are removed
}

// enter waits for a place among a tenant's uploads.
func (f *files) enter(ctx context.Context, tenant string) (l *lane, leave func(), err error) {
	f.mu.Lock()
	l = f.uploads[tenant]
	if l == nil {
		l = &lane{places: make(chan struct{}, maxUploads)}
		f.uploads[tenant] = l
	}
	l.users++
	f.mu.Unlock()
	away := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(f.uploads, tenant)
		}
	}
	select {
	case l.places <- struct{}{}:
		return l, func() {
			<-l.places
			away()
		}, nil
	case <-ctx.Done():
		away()
		return nil, nil, fault.New(fault.Unavailable, "other uploads took too long: %d go on at once", maxUploads)
	}
}

// path is where an archive is kept. A tenant may be called anything, so a hash of its name is used.
func (f *files) path(tenant, hash string) string {
	sum := sha256.Sum256([]byte(tenant))
	return filepath.Join(f.dir, hex.EncodeToString(sum[:16]), hash)
}

func (f *files) present(tenant, hash string) bool {
	info, err := os.Stat(f.path(tenant, hash))
	return err == nil && info.Mode().IsRegular()
}

// open gives an archive to a build and marks it as used.
func (f *files) open(tenant, hash string) (*os.File, error) {
	path := f.path(tenant, hash)
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "the files of this step were not uploaded")
	}
	if err != nil {
		return nil, err
	}
	_ = os.Chtimes(path, time.Time{}, time.Now()) // it only goes a little earlier otherwise
	return file, nil
}

// put keeps what a client sends, whole or not at all.
func (f *files) put(ctx context.Context, tenant, hash string, r io.Reader) error {
	l, leave, err := f.enter(ctx, tenant)
	if err != nil {
		return err
	}
	defer leave()
	space := diskspace.NewMeter(f.space)
	if err := space.Begin(); err != nil {
		return err
	}
	path := f.path(tenant, hash)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	part, err := os.CreateTemp(filepath.Dir(path), hash+"-*"+halfUploaded)
	if err != nil {
		return err
	}
	defer os.Remove(part.Name())
	defer part.Close()
	if _, err := io.Copy(space.Writer(part), r); err != nil {
		return err
	}
	if err := part.Close(); err != nil {
		return err
	}
	if err := os.Rename(part.Name(), path); err != nil {
		return err
	}
	l.removing.Lock()
	defer l.removing.Unlock()
	f.makeRoom(filepath.Dir(path), hash)
	return nil
}

// makeRoom removes a tenant's archives that were not used for longest, but never the newest. The
// caller holds removing of the tenant's lane.
func (f *files) makeRoom(dir, newest string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		f.log.Warn("uploaded files cannot be listed", "error", err)
		return
	}
	var kept []fs.FileInfo
	var total int64
	for _, e := range entries {
		if info, err := e.Info(); err == nil && !strings.HasSuffix(e.Name(), halfUploaded) {
			kept = append(kept, info)
			total += info.Size()
		}
	}
	slices.SortFunc(kept, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	left := len(kept)
	for _, info := range kept {
		if left <= maxKept && diskspace.Charge(total, left) <= f.maxAll {
			return
		}
		if info.Name() != newest && os.Remove(filepath.Join(dir, info.Name())) == nil {
			total -= info.Size()
			left--
		}
	}
}

// clean removes what uploads to an earlier server have left.
func (f *files) clean() {
	left, _ := filepath.Glob(filepath.Join(f.dir, "*", "*"+halfUploaded))
	for _, path := range left {
		_ = os.Remove(path) // it stays and takes room; the next start tries again
	}
}

// link is an URL that lets whoever has it upload one archive, without a key.
func (b *Builder) link(r *http.Request, tenant, template, hash string) string {
	until := strconv.FormatInt(time.Now().Add(linkFor).Unix(), 10)
	token := until + "." + base64.RawURLEncoding.EncodeToString([]byte(tenant)) + "." + b.sign(tenant, template, hash, until)
	return fmt.Sprintf("%s/templates/%s/files/%s/upload?token=%s", strings.TrimRight(b.cfg.URL(r), "/"),
		url.PathEscape(template), url.PathEscape(hash), url.QueryEscape(token))
}

func (b *Builder) sign(parts ...string) string {
	mac := hmac.New(sha256.New, b.cfg.Secret)
	mac.Write([]byte("upload"))
	for _, p := range parts {
		fmt.Fprintf(mac, "\x00%d\x00%s", len(p), p)
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// admit tells whose upload a token allows.
func (b *Builder) admit(token, template, hash string) (tenant string, err error) {
	refused := fault.New(fault.Denied, "this upload link is not valid or has expired; ask for a new one")
	until, rest, _ := strings.Cut(token, ".")
	encoded, mac, _ := strings.Cut(rest, ".")
	name, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return "", refused
	}
	seconds, err := strconv.ParseInt(until, 10, 64)
	if err != nil || !hmac.Equal([]byte(mac), []byte(b.sign(string(name), template, hash, until))) || time.Now().Unix() > seconds {
		return "", refused
	}
	return string(name), nil
}

// ServeUpload takes an archive: PUT /templates/{id}/files/{hash}/upload?token=… It needs no key: the token is one.
func (b *Builder) ServeUpload(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), uploadFor)
	defer cancel()
	r, done := transfer.Patient(w, r.WithContext(ctx))
	defer done()
	vars, ok := match("/templates/{id}/files/{hash}/upload", r.URL.EscapedPath())
	switch {
	case !ok || !hashForm.MatchString(vars["hash"]):
		fail(w, http.StatusNotFound, "there is nothing to upload here")
		return
	case r.Method != http.MethodPut:
		w.Header().Set("Allow", http.MethodPut)
		fail(w, http.StatusMethodNotAllowed, "use PUT to upload files")
		return
	}
	tenant, err := b.admit(r.URL.Query().Get("token"), vars["id"], vars["hash"])
	if err != nil {
		b.refuse(w, r, err)
		return
	}
	if r.ContentLength > b.files.maxOne {
		b.tooLarge(w)
		return
	}
	err = b.files.put(ctx, tenant, vars["hash"], http.MaxBytesReader(w, r.Body, b.files.maxOne))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		b.tooLarge(w)
	case fault.Is(err, fault.Unavailable):
		b.refuse(w, r, err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		b.refuse(w, r, fault.Wrap(fault.Invalid, err, "the upload was cut off"))
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		b.refuse(w, r, fault.Wrap(fault.Invalid, err, "the upload did not come in time"))
	case err != nil && ctx.Err() != nil:
		b.refuse(w, r, fault.Wrap(fault.Unavailable, err, "the upload was cut off"))
	case err != nil:
		b.refuse(w, r, fmt.Errorf("keep uploaded files of tenant %s: %w", tenant, err))
	default:
		w.WriteHeader(http.StatusOK)
	}
}

func (b *Builder) tooLarge(w http.ResponseWriter) {
	fail(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the files of one step may have %d MiB at most", b.files.maxOne>>20))
}

package image

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// found is one image of an archive.
type found struct {
	blueprint
	names []string          // in full
	at    map[string]string // layer without compression → member; a root file system has none: it is the archive itself
}

// Import brings in the images of an archive: of docker save, an OCI image layout or a root file system, which is told apart by
// its content, plain or compressed. The name is for an archive that holds one image; without it the archive's own names count.
func (s *Service) Import(ctx context.Context, tenant, name string, r io.Reader, progress func(template.PullProgress)) ([]Info, error) {
	if err := s.canUnpack(); err != nil {
		return nil, err
	}
	name, err := importName(name)
	if err != nil {
		return nil, err
	}
	ctx, end, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	leave, err := s.importPlace(ctx, tenant)
	if err != nil {
		return nil, err
	}
	defer leave()
	if progress == nil {
		progress = func(template.PullProgress) {}
	}
	a, err := s.spool(ctx, r, progress)
	if err != nil {
		return nil, err
	}
	defer os.Remove(a.file.Name())
	defer a.file.Close()
	images, err := s.images(ctx, a, name)
	if err != nil {
		return nil, err
	}
	defer s.begin()()
	var infos []Info
	for _, f := range images {
		got, err := s.importOne(ctx, tenant, a, f, progress)
		infos = append(infos, got...)
		if err != nil {
			return infos, err
		}
	}
	progress(template.PullProgress{Step: template.PullDone, Done: a.size, Total: a.size})
	return infos, nil
}

// How many archives are read at once: to read one can take as much memory as its compression wants.
const (
	importsOfTenant = 2
	importsOfAll    = 8
)

// importPlace waits until an archive may be read.
func (s *Service) importPlace(ctx context.Context, tenant string) (leave func(), err error) {
	out, err := s.crowd(s.imports, tenant, "imported")
	if err != nil {
		return nil, err
	}
	own, err := s.place(ctx, "imports of "+tenant, importsOfTenant)
	if err != nil {
		out()
		return nil, err
	}
	all, err := s.place(ctx, "imports", importsOfAll)
	if err != nil {
		own()
		out()
		return nil, err
	}
	return func() { all(); own(); out() }, nil
}

func importName(name string) (string, error) {
	if name == "" {
		return "", nil
	}
	r, err := parseReference(name)
	if err == nil && r.digest != "" {
		err = fault.New(fault.Invalid, "a digest is not a name that can be given")
	}
	return r.String(), err
}

// enter makes a caller's work end with the service, which waits for it.
func (s *Service) enter(ctx context.Context) (context.Context, func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed
	}
	s.work.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.life, cancel)
	return ctx, func() { stop(); cancel(); s.work.Done() }, nil
}

// spool writes an archive of unknown length to a file, so that it can be read in the order that it needs.
func (s *Service) spool(ctx context.Context, r io.Reader, progress func(template.PullProgress)) (*archive, error) {
	file, err := os.CreateTemp(s.tempDir(), "import-*")
	if err != nil {
		return nil, cmp.Or(diskFull(err), err)
	}
	a := &archive{file: file}
	most := archiveBytes(s.cfg.MaxBytes)
	told := int64(0)
	a.size, a.diff, err = copyPlain(diskspace.NewMeter(s.cfg.Space).Writer(file), &interruptible{ctx, r}, most, func(n int64) {
		if n-told >= 1<<20 {
			told = n
			progress(template.PullProgress{Step: template.PullDownload, Done: n})
		}
	})
	if err = spoolFailure(ctx, err); err == nil && a.size > most {
		err = tooLarge("the archive", s.cfg.MaxBytes)
	}
	if err == nil {
		err = a.index(ctx)
	}
	if err != nil {
		file.Close()
		os.Remove(file.Name())
		return nil, err
	}
	return a, nil
}

func spoolFailure(ctx context.Context, err error) error {
	var f *fault.Error
	switch {
	case err == nil, errors.As(err, &f):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errFile):
		return cmp.Or(diskFull(err), err)
	}
	return fault.Wrap(fault.Invalid, err, "the archive is damaged or cut off")
}

// images are what an archive holds, with the names that they get.
func (s *Service) images(ctx context.Context, a *archive, name string) ([]found, error) {
	var all []found
	var err error
	switch form, list := a.form(); form {
	case formDocker:
		all, err = s.fromDocker(a, list)
	case formOCI:
		all, err = s.fromOCI(a)
	case formRootFS:
		all, err = s.fromRootFS(a, name)
	}
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fault.New(fault.Invalid, "there is no image in the archive")
	}
	if name != "" && len(all) > 1 {
		return nil, fault.New(fault.Invalid, "the archive holds %d images: leave the name out", len(all))
	}
	for i := range all {
		if name != "" {
			all[i].names = []string{name}
		}
		if len(all[i].names) == 0 {
			return nil, fault.New(fault.Invalid, "an image in the archive has no name: give one")
		}
		all[i].add.Image.Reference = all[i].names[0]
		all[i].add.Description = "image " + all[i].names[0]
	}
	return all, ctx.Err()
}

// fromDocker reads what docker save wrote. There are no manifests in it: an image is known by the digest of its configuration.
func (s *Service) fromDocker(a *archive, list []saved) ([]found, error) {
	if len(list) > maxImages {
		return nil, fault.New(fault.Invalid, "the archive holds %d images; at most %d are taken at once", len(list), maxImages)
	}
	var all []found
	for _, image := range list {
		if len(image.Layers) > maxLayers {
			return nil, fault.New(fault.Invalid, "an image in the archive has %d layers; at most %d are possible", len(image.Layers), maxLayers)
		}
		config, ok := a.read(image.Config, maxConfig)
		if !ok {
			return nil, fault.New(fault.Invalid, "the archive lacks the configuration of an image")
		}
		digest := digestOf(config)
		m := &v1.Manifest{Layers: make([]v1.Descriptor, len(image.Layers))}
		f, err := s.describeMember(a, m, digest, config, image.Layers)
		if err != nil {
			return nil, err
		}
		for _, tag := range image.RepoTags {
			r, err := parseReference(tag)
			if err != nil {
				return nil, err
			}
			f.names = append(f.names, r.String())
		}
		all = append(all, f)
	}
	return all, nil
}

// describeMember is an image whose layers are the given members of an archive.
func (s *Service) describeMember(a *archive, m *v1.Manifest, digest string, config []byte, members []string) (found, error) {
	const what = "an image in the archive"
	m.Config.Digest, _ = v1.NewHash(digestOf(config)) // ours is well formed
	b, err := describe(what, s.cfg.Platform, digest, m, config)
	if err != nil {
		return found{}, err
	}
	f := found{blueprint: b, at: map[string]string{}}
	for i, name := range members {
		r, ok := a.open(name)
		if !ok {
			return found{}, fault.New(fault.Invalid, "the archive lacks layer %d of an image", i+1)
		}
		f.at[b.diffs[i]] = name
		f.layers[i].Size = r.Size()
	}
	return f, s.fits(what, f.layers)
}

// fromRootFS is a file system as an image of one layer, without a configuration.
func (s *Service) fromRootFS(a *archive, name string) ([]found, error) {
	if a.size%512 != 0 || a.size == 0 { // tars are made of blocks; a text is read as the end of an archive otherwise
		return nil, errNoTar
	}
	if name == "" {
		return nil, fault.New(fault.Invalid, "the archive is a root file system, which has no name: give one")
	}
	diff, err := v1.NewHash(a.diff)
	if err != nil {
		return nil, err
	}
	os, arch, _ := strings.Cut(s.cfg.Platform, "/")
	config, err := json.Marshal(v1.ConfigFile{OS: os, Architecture: arch, RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diff}}})
	if err != nil {
		return nil, err
	}
	m := &v1.Manifest{Layers: []v1.Descriptor{{Digest: diff, Size: a.size}}}
	m.Config.Digest, _ = v1.NewHash(digestOf(config))
	b, err := describe(name, s.cfg.Platform, digestOf(config), m, config)
	return []found{{blueprint: b}}, err
}

// importOne unpacks an image's layers, makes its template and gives it its names.
func (s *Service) importOne(ctx context.Context, tenant string, a *archive, f found, progress func(template.PullProgress)) ([]Info, error) {
	what := f.names[0]
	news := make(chan template.PullProgress)
	done := make(chan struct{})
	go func() { // layers are unpacked side by side, and the caller hears of one thing at a time
		defer close(done)
		for p := range news {
			progress(p)
		}
	}()
	bytes, err := s.layers(ctx, tenant, what, f.blueprint, func(ctx context.Context, l layer) (sandbox.Layer, error) {
		return s.importLayer(ctx, tenant, what, a, f, l, func(p template.PullProgress) { news <- p })
	})
	close(news)
	<-done
	if err != nil {
		return nil, err
	}
	f.add.Image.Bytes = bytes
	var infos []Info
	for _, name := range f.names {
		e, err := s.addImage(ctx, tenant, name, "", f.blueprint)
		if err != nil {
			return infos, err
		}
		infos = append(infos, e.info())
	}
	s.log.Info("image imported", "tenant", tenant, "image", what, "digest", f.digest, "template", f.add.Name, "layers", len(f.layers), "bytes", bytes)
	return infos, nil
}

func (s *Service) importLayer(ctx context.Context, tenant, what string, a *archive, f found, l layer, tell func(template.PullProgress)) (sandbox.Layer, error) {
	got, here, err := s.known(ctx, tenant, l.diff)
	if err != nil {
		return sandbox.Layer{}, err
	}
	if here {
		tell(template.PullProgress{Step: template.PullKnown, Layer: l.diff, Done: l.blob.Size, Total: l.blob.Size})
		return got, nil
	}
	tell(template.PullProgress{Step: template.PullUnpack, Layer: l.diff, Total: l.blob.Size})
	blob := a.file
	if f.at != nil {
		if blob, err = s.extract(ctx, a, f.at[l.diff], l.blob); err != nil {
			return sandbox.Layer{}, err
		}
		defer os.Remove(blob.Name())
		defer blob.Close()
	}
	if got, err = s.take(ctx, tenant, what, l, blob); err != nil {
		return sandbox.Layer{}, fmt.Errorf("layer %s: %w", l.diff, err)
	}
	tell(template.PullProgress{Step: template.PullDone, Layer: l.diff, Done: l.blob.Size, Total: l.blob.Size})
	return got, nil
}

// extract copies a member into a file of its own: that is what layers are unpacked from.
func (s *Service) extract(ctx context.Context, a *archive, name string, blob v1.Descriptor) (*os.File, error) {
	r, ok := a.open(name)
	if !ok {
		return nil, fault.New(fault.Invalid, "the archive lacks a layer")
	}
	file, err := os.CreateTemp(s.tempDir(), "layer-*")
	if err != nil {
		return nil, cmp.Or(diskFull(err), err)
	}
	sum, err := copySum(diskspace.NewMeter(s.cfg.Space).Writer(file), &interruptible{ctx, r})
	if err == nil && blob.Digest.Hex != "" && sum != blob.Digest.String() {
		err = fault.New(fault.Invalid, "the archive is damaged: a layer does not have its digest")
	}
	if err != nil {
		file.Close()
		os.Remove(file.Name())
		return nil, cmp.Or(diskFull(err), err)
	}
	return file, nil
}

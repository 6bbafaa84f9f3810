package imagebuild

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/client"
)

// many is from how many files on a copy goes as an archive: one command is then quicker than a request for each file.
const many = 64

// hasTar tells whether the sandbox can unpack an archive.
func (s *site) hasTar(ctx context.Context) bool {
	out, err := s.sb.Exec(ctx, client.ExecRequest{Argv: []string{"/bin/sh", "-c", "command -v tar"}, User: "root", Cwd: "/"})
	return err == nil && failure(&out.End) == nil
}

// pack sends directories, files and links as an archive.
func (w *writing) pack(ctx context.Context, files []outgoing) error {
	uid, _ := strconv.Atoi(w.uid) // empty: root
	gid, _ := strconv.Atoi(w.gid)
	now := time.Now()
	return w.site.unpack(ctx, func(t *tar.Writer) error {
		header := func(h tar.Header) error {
			h.Name, h.Uid, h.Gid, h.ModTime, h.Format = strings.TrimPrefix(h.Name, "/"), uid, gid, now, tar.FormatGNU // which busybox reads too
			return t.WriteHeader(&h)
		}
		for i := range w.dirs {
			if err := header(tar.Header{Typeflag: tar.TypeDir, Name: w.dirs[i].to + "/", Mode: int64(w.dirs[i].mode)}); err != nil {
				return err
			}
		}
		for i := range files {
			f := &files[i]
			if err := header(tar.Header{Typeflag: tar.TypeReg, Name: f.to, Mode: int64(f.mode), Size: f.size}); err != nil {
				return err
			}
			if err := f.copyTo(t); err != nil {
				return fmt.Errorf("write %s: %w", f.to, err)
			}
		}
		for i := 0; i < len(w.links); i += 2 {
			if err := header(tar.Header{Typeflag: tar.TypeSymlink, Name: w.links[i+1], Linkname: w.links[i], Mode: 0o777}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (f *outgoing) copyTo(w io.Writer) error {
	r, err := f.open()
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.Copy(w, r)
	if err == nil && n != f.size {
		err = errors.New("it changed while it was read")
	}
	return err
}

// unpack runs tar in the sandbox's root directory and feeds it.
func (s *site) unpack(ctx context.Context, fill func(*tar.Writer) error) error {
	session, err := s.sb.Start(ctx, client.ExecRequest{Argv: []string{"tar", "-x", "-p", "-f", "-"}, User: "root", Cwd: "/"})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- outcome(session) }() // ends with the session at the latest
	to := bufio.NewWriterSize(session, 256<<10)
	archive := tar.NewWriter(to)
	err = fill(archive)
	if err == nil {
		err = errors.Join(archive.Close(), to.Flush(), session.CloseStdin())
	}
	if err != nil {
		session.Close()
		if why := <-ended; why != nil && !errors.Is(why, errNoEnd) { // tar has said why it reads no more
			err = why
		}
		return err
	}
	err = <-ended
	session.Close()
	return err
}

var errNoEnd = errors.New("the connection to the sandbox was lost")

// outcome follows a command that should say nothing to its end.
func outcome(session *client.Session) error {
	var said bytes.Buffer
	for e, err := range session.Events() {
		if err != nil {
			return fmt.Errorf("%w: %w", errNoEnd, err)
		}
		switch e.Type {
		case client.EventStderr, client.EventStdout:
			if said.Len() < 4<<10 {
				said.Write(e.Data())
			}
		case client.EventEnd:
			err := failure(e.End)
			if err != nil && said.Len() > 0 {
				err = fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
			}
			return err
		case client.EventStarted, client.EventResult, client.EventError, client.EventFile, client.EventNotice, client.EventFault:
		}
	}
	return errNoEnd
}

// emptyArchive is the root directory of an image without files.
func emptyArchive() (io.Reader, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755}); err != nil {
		return nil, err
	}
	return &b, w.Close()
}

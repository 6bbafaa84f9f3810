package transfer_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestAFileIsReadFromWhereverItIsPut(t *testing.T) {
	const text = "0123456789"
	opened := 0
	f := transfer.NewFile(int64(len(text)), io.NopCloser(strings.NewReader(text)), func(offset int64) (io.ReadCloser, error) {
		opened++
		return io.NopCloser(strings.NewReader(text[offset:])), nil
	})
	defer f.Close()
	read := func(n int) string {
		b := make([]byte, n)
		if _, err := io.ReadFull(f, b); err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := read(3) + read(2); got != "01234" || opened != 0 {
		t.Fatalf("%q, opened %d times", got, opened)
	}
	for whence, want := range map[int]string{io.SeekStart: "23", io.SeekEnd: "78"} {
		offset := int64(2)
		if whence == io.SeekEnd {
			offset = -3
		}
		if _, err := f.Seek(offset, whence); err != nil {
			t.Fatal(err)
		}
		if got := read(2); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if _, err := f.Seek(-1, io.SeekStart); err == nil || f.Err() != nil {
		t.Errorf("%v, %v", err, f.Err())
	}
}

func TestAFileRemembersWhyItFailed(t *testing.T) {
	gone := errors.New("gone")
	f := transfer.NewFile(10, io.NopCloser(strings.NewReader("0123456789")), func(int64) (io.ReadCloser, error) { return nil, gone })
	if _, err := f.Seek(5, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(f); !errors.Is(err, gone) || !errors.Is(f.Err(), gone) {
		t.Errorf("%v, %v", err, f.Err())
	}
}

//go:build !linux

package template

import (
	"context"
	"errors"
	"io/fs"
)

// Templates of the host are built on Linux; elsewhere this package only describes them.

func setOpaque(string) error           { return errors.ErrUnsupported }
func isOpaque(string) bool             { return false }
func lockedByOther(string) bool        { return false }
func makeWhiteout(string) error        { return errors.ErrUnsupported }
func ownerOf(fs.FileInfo) int          { return -1 }
func groupOf(fs.FileInfo) int          { return -1 }
func bytesOnDisk(string) int64         { return 0 }
func syncDir(string) error             { return errors.ErrUnsupported }
func (l *layer) keepHome(string) error { return errors.ErrUnsupported }

func takeCensus(string) (census, error) { return census{}, errors.ErrUnsupported }

func imageSeal(context.Context, string) (string, error) { return "", errors.ErrUnsupported }

func lockFile(context.Context, string, func()) (func(), error) { return nil, errors.ErrUnsupported }

func (t *Template) try(context.Context, string, []string, func(string) error) ([]byte, error) {
	return nil, errors.ErrUnsupported
}

package agent

import (
	"io"
	"os"
	"syscall"
)

// vacant tells that a directory is there and holds nothing, which spares whoever collects it a connection. No name in it is
// told, so it is looked at with the agent's own rights; a link in its place is not followed.
func vacant(path string) bool {
	fd, err := open(atFDCWD, path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	_, err = f.Readdirnames(1)
	return err == io.EOF
}

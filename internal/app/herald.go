package app

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// herald is a child that writes the ready file for a server which has given up the right to: it is started before, waits
// for the text, writes it and ends.
type herald struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

const heraldCommand = "herald"

func startHerald(file string) (*herald, error) {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // an old one would be taken for ours
	}
	path, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe", heraldCommand, path)
	cmd.Env = []string{}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &herald{cmd, stdin}, nil
}

func (h *herald) tell(a Address) error {
	if err := json.NewEncoder(h.stdin).Encode(a); err != nil {
		return err
	}
	return h.close()
}

// close lets the herald end; without a word from us it writes nothing.
func (h *herald) close() error {
	if h.cmd.ProcessState != nil {
		return nil
	}
	if err := h.stdin.Close(); err != nil {
		return err
	}
	if err := h.cmd.Wait(); err != nil {
		return fmt.Errorf("write the ready file: %w", err)
	}
	return nil
}

func heraldMain(args []string, stdin io.Reader) error {
	if len(args) != 1 {
		return errors.New("want one file")
	}
	text, err := io.ReadAll(io.LimitReader(stdin, 64<<10))
	if err != nil || len(text) == 0 {
		return err
	}
	return writeFile(args[0], text, 0o600)
}

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/config"
)

// Run serves until ctx ends, then stops gracefully. What a person should know goes to out, which may be a
// terminal, the log to logs.
func Run(ctx context.Context, cfg config.Config, out, logs io.Writer, terminal bool) error {
	log := NewLogger(cfg.Log, logs)
	s, err := Start(ctx, cfg, log, func(line string) { fmt.Fprintln(out, line) })
	if err != nil {
		return err
	}
	if err := s.announce(out, terminal); err != nil {
		return errors.Join(err, s.Close())
	}
	log.Info("serving", "url", s.URL, "driver", s.Caps.Name, "data_dir", cfg.DataDir, "pid", os.Getpid())
	select {
	case <-ctx.Done():
		log.Info("shutting down", "grace", cfg.ShutdownGrace)
	case err = <-s.Done():
	}
	return errors.Join(err, s.withdraw(), s.Close())
}

// Address is how others find a server: DATA/server.json, and with the key the ready file.
type Address struct {
	URL    string `json:"url"`
	APIKey string `json:"api_key,omitempty"`
	PID    int    `json:"pid"`
	Domain string `json:"domain,omitempty"`  // where sandboxes have host names over TLS, with its port
	CAFile string `json:"ca_file,omitempty"` // what must be trusted for that
}

// stateDir holds what is the server's own: the database, the local key, where it listens.
func stateDir(dataDir string) string { return filepath.Join(dataDir, "server") }

func addressFile(dataDir string) string { return filepath.Join(stateDir(dataDir), "server.json") }
func keyFile(dataDir string) string     { return filepath.Join(stateDir(dataDir), "api_key") }

// announce tells the local CLI, scripts and people where the server is.
func (s *Server) announce(out io.Writer, terminal bool) error {
	address := Address{URL: s.URL, PID: os.Getpid(), Domain: s.Domain, CAFile: s.CAFile}
	if err := writeJSON(addressFile(s.cfg.DataDir), address, 0o600); errors.Is(err, syscall.ENOSPC) {
		s.log.Warn("the disk is full: programs on this machine do not find the server by its data directory", "error", err)
	} else if err != nil {
		return err
	}
	s.printNext(out, terminal)
	if s.cfg.ReadyFile == "" {
		return nil
	}
	address.APIKey = string(s.Key)
	if s.herald != nil {
		return s.herald.tell(address)
	}
	return writeJSON(s.cfg.ReadyFile, address, 0o600)
}

// withdraw is the opposite of announce.
func (s *Server) withdraw() error {
	var all []error
	for _, name := range []string{addressFile(s.cfg.DataDir), s.cfg.ReadyFile} {
		if name == "" {
			continue
		}
		err := os.Remove(name)
		if errors.Is(err, fs.ErrPermission) && name == s.cfg.ReadyFile {
			continue // written before privilege was given up; the next start replaces it
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// Find is the address of the server that runs on a data directory, with the local key, or fs.ErrNotExist.
func Find(ctx context.Context, dataDir string) (Address, error) {
	text, err := os.ReadFile(addressFile(dataDir))
	if err != nil {
		return Address{}, err
	}
	var a Address
	if err := json.Unmarshal(text, &a); err != nil {
		return Address{}, fmt.Errorf("%s: %w", addressFile(dataDir), err)
	}
	if !answers(ctx, a.URL) {
		return Address{}, fs.ErrNotExist // left behind by a server that was killed
	}
	if a.APIKey, err = LocalKey(dataDir); err != nil {
		return Address{}, err
	}
	return a, nil
}

// LocalKey is the admin key that a server keeps in its data directory.
func LocalKey(dataDir string) (string, error) {
	key, err := os.ReadFile(keyFile(dataDir))
	if err != nil {
		return "", fmt.Errorf("read the local API key: %w", err)
	}
	return strings.TrimSpace(string(key)), nil
}

func answers(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func writeJSON(name string, value any, mode os.FileMode) error {
	b, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return writeFile(name, append(b, '\n'), mode)
}

// writeFile makes content appear at once: whoever waits for the file never reads half of it.
func writeFile(name string, content []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(f.Name()))
	}
	return nil
}

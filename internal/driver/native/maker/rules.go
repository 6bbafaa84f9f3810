package maker

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

// writeRules keeps what the operator allows in a file that root alone can write. A file that says so already is left as it
// is: a server must start also when the disk is full.
func writeRules(dataDir, file string, rules any) error {
	dir := filepath.Join(dataDir, "maker")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := rootsOwn(dir); err != nil {
		return err
	}
	text, err := json.MarshalIndent(rules, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if old, err := readRulesFile(file, "rules"); err == nil && bytes.Equal(old, text) {
		return nil
	}
	f, err := os.CreateTemp(dir, "rules")
	if err != nil {
		return fullHost(err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fullHost(err)
	}
	return os.Rename(f.Name(), file)
}

// readRules reads such a file. Without a file, rules stay as they are: nothing is allowed. A file that others than root can
// write is refused.
func readRules(file, what string, rules any) error {
	text, err := readRulesFile(file, what)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, rules)
}

func readRulesFile(file, what string) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if st.Uid != 0 || st.Mode&0o022 != 0 || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fault.New(fault.Denied, "the list of allowed %s is not root's alone, so none is allowed: chown root and chmod go-w %s", what, f.Name())
	}
	return io.ReadAll(f)
}

func networksFile(dataDir string) string { return filepath.Join(dataDir, "maker", "networks.json") }

// WriteNetworks keeps the operator's rules about private networks for the maker.
func WriteNetworks(dataDir string, rules policy.Rules) error {
	if err := rules.Validate(); err != nil {
		return err
	}
	return writeRules(dataDir, networksFile(dataDir), policy.Rules{Private: rules.Private})
}

// checkNetwork refuses a list that names private networks which the operator has not opened. The server has refused it
// before; the maker does not rely on that. Only such a list costs a look at the file.
func (m *Maker) checkNetwork(n policy.Network, tenant string) error {
	if (policy.Rules{}).Check(n, tenant) == nil {
		return nil
	}
	var rules policy.Rules
	if err := readRules(networksFile(m.cfg.DataDir), "private networks", &rules); err != nil {
		return err
	}
	return rules.Check(n, tenant)
}

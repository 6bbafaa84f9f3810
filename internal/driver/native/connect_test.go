package native

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
)

func TestConnect_NoMaker(t *testing.T) {
	dir := t.TempDir()
	d := &Driver{path: filepath.Join(dir, "run", "maker.sock")}
	_, err := d.connect(t.Context())
	if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "`sudo cove maker --data-dir DIR`") {
		t.Errorf("a tenant is told %v", err)
	}
	if strings.Contains(fault.Message(err), dir) {
		t.Errorf("a tenant is told where the data directory is: %s", fault.Message(err))
	}
	if logged := fmt.Sprint(err); !strings.Contains(logged, " maker --data-dir "+dir+" --server-uid ") {
		t.Errorf("the log has %s", logged)
	}
}

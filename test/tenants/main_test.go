package tenants_test

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"text/tabwriter"
)

// requireTenants skips a test that needs a real server unless COVE_TENANTS=1.
func requireTenants(t *testing.T) {
	t.Helper()
	if os.Getenv("COVE_TENANTS") == "" {
		t.Skip("these trials take minutes and need root; `make test-tenants` runs them")
	}
}

func TestMain(m *testing.M) {
	code := m.Run()
	report()
	os.Exit(code)
}

// row is one line of the printed table.
type row struct{ route, a, b, verdict string }

var rows struct {
	sync.Mutex
	all []row
}

func addRow(r row) {
	rows.Lock()
	defer rows.Unlock()
	rows.all = append(rows.all, r)
}

// report prints the table of all trials that ran.
func report() {
	rows.Lock()
	defer rows.Unlock()
	if len(rows.all) == 0 {
		return
	}
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ROUTE\tA, WHO OWNS IT\tB, ANOTHER TENANT\tVERDICT")
	leaks := 0
	for _, r := range rows.all {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.route, r.a, r.b, r.verdict)
		if r.verdict == broken {
			leaks++
		}
	}
	_ = w.Flush()
	fmt.Printf("%d trials, %d broken\n", len(rows.all), leaks)
}

const (
	holds  = "holds"
	broken = "BROKEN"
)

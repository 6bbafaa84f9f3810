package chaos_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/covehq/cove/test/testserver"
)

// COVE_CHAOS=1 runs the faults; COVE_CHAOS_SEED repeats the random moments of an earlier run.
var seed = uint64(number("COVE_CHAOS_SEED", int(time.Now().UnixNano()&0x7fffffff)))

func TestMain(m *testing.M) {
	if os.Getenv("COVE_CHAOS") == "" {
		fmt.Println("skipped: these faults take minutes; `make test-chaos` runs them")
		return
	}
	fmt.Printf("seed %d (COVE_CHAOS_SEED repeats it)\n", seed)
	os.Exit(runReported(m))
}

// runReported prints the table after the tests have run, also when they are interrupted.
func runReported(m *testing.M) int {
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	done := make(chan int, 1)
	go func() { done <- m.Run() }()
	defer report()
	select {
	case code := <-done:
		return code
	case <-interrupted: // each server's guard ends what it left
		return 130
	}
}

func number(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// row is what one fault did.
type row struct {
	Fault    string         `json:"fault"`
	Holds    bool           `json:"holds"`
	Clients  map[string]int `json:"clients"`         // answers by status, during the fault and after it
	Service  float64        `json:"service_seconds"` // from the fault's end, or its moment if it has none, to the first good cell of a new sandbox
	Lost     []string       `json:"lost"`
	Counted  bool           `json:"counted"` // what was left over
	Left     []string       `json:"left_over"`
	Notes    []string       `json:"notes,omitempty"`
	Failures []string       `json:"failures,omitempty"`
	Seconds  float64        `json:"seconds"`
}

var rows struct {
	sync.Mutex
	all []*row
}

// fault is one fault under way. It is a testing.TB that writes its failures into the row.
type fault struct {
	*testing.T
	row  *row
	rand *rand.Rand
	mu   sync.Mutex
}

// begin opens the row of a fault; it is printed when the test ends.
func begin(t *testing.T, what string) *fault {
	t.Helper()
	f := &fault{T: t, row: &row{Fault: what, Clients: map[string]int{}, Service: -1}}
	hash := seed
	for _, c := range t.Name() {
		hash = hash*31 + uint64(c)
	}
	f.rand = rand.New(rand.NewPCG(seed, hash))
	begun := time.Now()
	t.Cleanup(func() { // the first cleanup runs last: after the server's own, which counts what is left over
		f.row.Seconds = time.Since(begun).Seconds()
		f.row.Holds = !t.Failed()
		rows.Lock()
		defer rows.Unlock()
		rows.all = append(rows.all, f.row)
		fmt.Println("chaos:", f.row)
	})
	return f
}

func (f *fault) note(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.row.Notes = append(f.row.Notes, fmt.Sprintf(format, args...))
}

// Errorf fails the fault and keeps the sentence in its row.
func (f *fault) Errorf(format string, args ...any) {
	f.Helper()
	f.fails(fmt.Sprintf(format, args...))
	f.T.Errorf(format, args...)
}

// Error is Errorf without a format.
func (f *fault) Error(args ...any) {
	f.Helper()
	f.fails(fmt.Sprint(args...))
	f.T.Error(args...)
}

// Fatalf is Errorf that ends the test.
func (f *fault) Fatalf(format string, args ...any) {
	f.Helper()
	f.fails(fmt.Sprintf(format, args...))
	f.T.Fatalf(format, args...)
}

// Fatal is Fatalf without a format.
func (f *fault) Fatal(args ...any) {
	f.Helper()
	f.fails(fmt.Sprint(args...))
	f.T.Fatal(args...)
}

func (f *fault) fails(sentence string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.row.Failures = append(f.row.Failures, sentence)
	if strings.HasPrefix(sentence, "left over") {
		f.row.Left = append(f.row.Left, sentence)
	}
}

// lost notes something that a client had and has no more, which this fault must not take.
func (f *fault) lost(format string, args ...any) {
	f.Helper()
	sentence := fmt.Sprintf(format, args...)
	f.mu.Lock()
	f.row.Lost = append(f.row.Lost, sentence)
	f.mu.Unlock()
	f.Errorf("lost: %s", sentence)
}

func (r *row) clients() string {
	var words []string
	for _, status := range slices.Sorted(maps.Keys(r.Clients)) {
		words = append(words, fmt.Sprintf("%s:%d", status, r.Clients[status]))
	}
	return or(strings.Join(words, " "), "-")
}

func (r *row) service() string {
	if r.Service < 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fs", r.Service)
}

// left tells what was left over. Where nothing counted it, that is not known.
func (r *row) left() string {
	if !r.Counted && len(r.Left) == 0 {
		return "not counted"
	}
	return or(strings.Join(r.Left, "; "), "nothing")
}

func (r *row) verdict() string {
	if r.Holds {
		return "holds"
	}
	return "BROKEN"
}

func (r *row) String() string {
	text := fmt.Sprintf("%s | %s | clients %s | service %s | lost %d | left over: %s | took %.0fs", r.Fault, r.verdict(), r.clients(), r.service(), len(r.Lost), r.left(), r.Seconds)
	for _, n := range r.Notes {
		text += "\n    " + n
	}
	for _, n := range r.Failures {
		text += "\n    BROKEN: " + n[:min(len(n), 600)]
	}
	return text
}

func or(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// report prints the table and writes bin/chaos.json.
func report() {
	rows.Lock()
	defer rows.Unlock()
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FAULT\tRESULT\tCLIENTS SAW\tSERVICE AFTER\tLOST\tLEFT OVER\tTOOK")
	for _, r := range rows.all {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%.0fs\n", r.Fault, r.verdict(), r.clients(), r.service(), or(strings.Join(r.Lost, "; "), "nothing"), r.left(), r.Seconds)
	}
	_ = w.Flush()
	text, err := json.MarshalIndent(map[string]any{"seed": seed, "faults": rows.all}, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(testserver.Root(), "bin", "chaos.json"), append(text, '\n'), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos: write the report:", err)
	}
}

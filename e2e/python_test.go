package e2e_test

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// The Python package against a server: its own client, and the tools for LangChain, LangGraph and deepagents. The tests are
// in python/tests; COVE_PYTEST_ARGS picks some of them.

var pythonPackages = sync.OnceValues(func() (string, error) { return venv("python", "../python/requirements.lock") })

// deepAgentsCode lays Deep Agents Code over the packages of a suite: all that its makers of sandboxes need is there.
func deepAgentsCode(name, packages string) (string, error) {
	return installed(name+"-dcode", "../python/tests/dcode/requirements.lock", func(dir, lock string) [][]string {
		pip := filepath.Join(packages, "bin", "pip")
		return [][]string{{pip, "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--target", dir, "-r", lock}}
	})
}

func TestPython(t *testing.T) {
	slow.Test(t)
	t.Parallel() // each of these suites has a server of its own
	packages, err := pythonPackages()
	if err != nil {
		t.Fatal(err)
	}
	dcode, err := deepAgentsCode("python", packages)
	if err != nil {
		t.Fatal(err)
	}
	data := hostData(t)
	spans := newSpanSink(t)
	s := newServer(t, append(spans.env(), `COVE_STORAGE_HOST_PATHS=`+data)...)
	t.Cleanup(func() { removeSnapshots(t, s) })
	foreign, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	env := append(s.python(dcode), "COVE_TEST_HOST_DATA="+data, "COVE_TEST_SPANS="+spans.URL, "COVE_TEST_BINARY="+binary.path,
		"COVE_TEST_FOREIGN_KEY="+foreign.Secret, "LANGSMITH_TRACING=false", "ANTHROPIC_API_KEY=", "OPENAI_API_KEY=")
	runSuite(t, pythonSuite(t, packages, "tests"), env)
}

// TestPythonDeepagents06 drives the backend with the version before, whose results have other types.
func TestPythonDeepagents06(t *testing.T) {
	slow.Test(t)
	t.Parallel()
	packages, err := venv("python-deepagents06", "../python/tests/deepagents06/requirements.lock")
	if err != nil {
		t.Fatal(err)
	}
	dcode, err := deepAgentsCode("python-deepagents06", packages)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t)
	t.Cleanup(func() { removeSnapshots(t, s) })
	runSuite(t, pythonSuite(t, packages, "tests/deepagents", "tests/checkpoint"), append(s.python(dcode), "LANGSMITH_TRACING=false"))
}

// python is how programs find the package, and others beside it, and the package finds a server. The E2B SDK below cove.e2b has
// variables of its own.
func (s *server) python(others ...string) []string {
	source, err := filepath.Abs("../python/src")
	if err != nil {
		panic(err) // there is no working directory
	}
	return append(s.e2b(), "COVE_URL="+s.url, "COVE_API_KEY="+s.key, "PYTHONPATH="+strings.Join(append([]string{source}, others...), ":"))
}

func pythonSuite(t *testing.T, packages string, suites ...string) []string {
	t.Helper()
	dir, err := filepath.Abs("../python")
	if err != nil {
		t.Fatal(err)
	}
	command := []string{filepath.Join(packages, "bin", "python"), "-B", "-m", "pytest", "--rootdir", dir, "-c", filepath.Join(dir, "pyproject.toml"), "--durations=10"}
	if args := os.Getenv("COVE_PYTEST_ARGS"); args != "" {
		return append(command, strings.Fields(args)...)
	}
	for _, suite := range suites {
		command = append(command, filepath.Join(dir, suite))
	}
	return command
}

// hostData is a directory that sandboxes may see; a server that has given up its privilege must be able to read it.
func hostData(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-host-data")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// spanSink takes the spans that a server exports and gives them to whoever asks: POST /v1/traces, GET /requests.
type spanSink struct {
	*httptest.Server
	mu       sync.Mutex
	requests [][]byte // ExportTraceServiceRequests, as they came
}

func newSpanSink(t *testing.T) *spanSink {
	t.Helper()
	s := &spanSink{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", s.take)
	mux.HandleFunc("GET /requests", s.give)
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

func (s *spanSink) env() []string {
	return []string{"OTEL_TRACES_EXPORTER=otlp", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + s.URL + "/v1/traces",
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf", "OTEL_BSP_SCHEDULE_DELAY=50"}
}

func (s *spanSink) take(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = unzipped
	}
	request, err := io.ReadAll(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, request)
}

func (s *spanSink) give(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = json.NewEncoder(w).Encode(s.requests) // whoever left does not need it
}

// TestLangGraphBench measures a tool call beside a fresh process: `make bench-langgraph` asks for it.
func TestLangGraphBench(t *testing.T) {
	out := os.Getenv("COVE_LANGGRAPH_BENCH")
	if out == "" {
		t.Skip("make bench-langgraph runs it")
	}
	packages, err := pythonPackages()
	if err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("../bench/langgraph/bench.py")
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t)
	// Bytecode is written, or the fresh process would be slower than it has to be.
	runSuite(t, []string{filepath.Join(packages, "bin", "python"), script, out}, append(s.python(), "LANGSMITH_TRACING=false"))
}

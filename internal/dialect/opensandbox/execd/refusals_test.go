package execd_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/fault"
)

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	if a := w.upload(part{"metadata", `{"path":"file"}`}, part{"file", "x"}); a.status != 200 {
		t.Fatalf("got %+v", a)
	}
	var session struct {
		ID string `json:"session_id"`
	}
	w.json(w.ask("POST", "/session", ""), &session)
	front := w.stream("/command", map[string]any{"command": "true"})[0].Text
	type obj = map[string]any
	for name, c := range map[string]struct {
		method, path string
		body         any
		status       int
		code         string
	}{
		"no such route":                    {"GET", "/nothing", nil, 404, "NOT_SUPPORTED"},
		"a path that is not clean":         {"GET", "//ping", nil, 404, "NOT_SUPPORTED"},
		"a path that goes up":              {"GET", "/files/../ping", nil, 404, "NOT_SUPPORTED"},
		"the wrong method":                 {"PUT", "/command", nil, 405, "NOT_SUPPORTED"},
		"a command without a body":         {"POST", "/command", nil, 400, "INVALID_REQUEST_BODY"},
		"a command that is no JSON":        {"POST", "/command", "{", 400, "INVALID_REQUEST_BODY"},
		"a command of the wrong type":      {"POST", "/command", obj{"command": 1}, 400, "INVALID_REQUEST_BODY"},
		"an empty command":                 {"POST", "/command", obj{"command": " "}, 400, "INVALID_REQUEST_BODY"},
		"a command and arguments":          {"POST", "/command", obj{"command": "a", "argv": []string{"b"}}, 400, "INVALID_REQUEST_BODY"},
		"a NUL byte":                       {"POST", "/command", obj{"command": "a\x00b"}, 400, "INVALID_REQUEST_BODY"},
		"a command that is too long":       {"POST", "/command", obj{"command": strings.Repeat("x", 140_000)}, 413, "INVALID_REQUEST_BODY"},
		"a body that is too long":          {"POST", "/command", obj{"command": strings.Repeat("x", 2_000_000)}, 413, "INVALID_REQUEST_BODY"},
		"a time that is negative":          {"POST", "/command", obj{"command": "a", "timeout": -1}, 400, "INVALID_REQUEST_BODY"},
		"a group without a user":           {"POST", "/command", obj{"command": "a", "gid": 1}, 400, "INVALID_REQUEST_BODY"},
		"a user that cannot be":            {"POST", "/command", obj{"command": "a", "uid": -1}, 400, "INVALID_REQUEST_BODY"},
		"a variable that cannot be":        {"POST", "/command", obj{"command": "a", "envs": obj{"A=B": "c"}}, 400, "INVALID_REQUEST_BODY"},
		"a directory that is not there":    {"POST", "/command", obj{"command": "a", "cwd": "/no/such"}, 400, "INVALID_REQUEST_BODY"},
		"a directory that is a file":       {"POST", "/command", obj{"command": "a", "cwd": "file"}, 400, "INVALID_REQUEST_BODY"},
		"an interrupt of nothing":          {"DELETE", "/command", nil, 400, "MISSING_QUERY"},
		"an interrupt of no command":       {"DELETE", "/command?id=x", nil, 400, "COMMAND_NOT_FOUND"},
		"the status of no command":         {"GET", "/command/status/x", nil, 404, "COMMAND_NOT_FOUND"},
		"the logs of no command":           {"GET", "/command/x/logs", nil, 404, "COMMAND_NOT_FOUND"},
		"the logs of a foreground command": {"GET", "/command/" + front + "/logs", nil, 400, "INVALID_REQUEST_BODY"},
		"something else of a command":      {"GET", "/command/x/y", nil, 404, "NOT_SUPPORTED"},
		"a session elsewhere":              {"POST", "/session", obj{"cwd": "/no/such"}, 400, "INVALID_REQUEST_BODY"},
		"a run in no session":              {"POST", "/session/x/run", obj{"command": "a"}, 404, "SESSION_NOT_FOUND"},
		"an empty run":                     {"POST", "/session/" + session.ID + "/run", obj{"command": ""}, 400, "INVALID_REQUEST_BODY"},
		"a run elsewhere":                  {"POST", "/session/" + session.ID + "/run", obj{"command": "a", "cwd": "/no/such"}, 400, "INVALID_REQUEST_BODY"},
		"no code":                          {"POST", "/code", obj{"context": obj{"language": "python"}}, 400, "INVALID_REQUEST_BODY"},
		"code in no context":               {"POST", "/code", obj{"code": "1", "context": obj{"id": "x", "language": "python"}}, 404, "CONTEXT_NOT_FOUND"},
		"a context without a language":     {"POST", "/code/context", obj{}, 400, "INVALID_REQUEST_BODY"},
		"a context of no language":         {"POST", "/code/context", obj{"language": "cobol"}, 400, "NOT_SUPPORTED"},
		"contexts of nothing":              {"DELETE", "/code/contexts", nil, 400, "MISSING_QUERY"},
		"no context":                       {"DELETE", "/code/contexts/x", nil, 404, "CONTEXT_NOT_FOUND"},
		"an interrupt of no code":          {"DELETE", "/code?id=x", nil, 400, "CONTEXT_NOT_FOUND"},
		"files without a path":             {"GET", "/files/info", nil, 400, "MISSING_QUERY"},
		"files with an empty path":         {"GET", "/files/info?path=", nil, 400, "INVALID_FILE"},
		"a path with a NUL byte":           {"GET", "/files/info?path=a%00b", nil, 400, "INVALID_FILE"},
		"no such file":                     {"GET", "/files/info?path=none", nil, 404, "FILE_NOT_FOUND"},
		"no such download":                 {"GET", "/files/download?path=none", nil, 404, "FILE_NOT_FOUND"},
		"a directory as a download":        {"GET", "/files/download?path=/tmp", nil, 400, "INVALID_FILE"},
		"lines that are none":              {"GET", "/files/download?path=file&offset=0", nil, 400, "MISSING_QUERY"},
		"a directory as a file":            {"DELETE", "/files?path=/tmp", nil, 400, "INVALID_FILE"},
		"a file as a directory":            {"DELETE", "/directories?path=file", nil, 400, "INVALID_FILE"},
		"everything":                       {"DELETE", "/directories?path=/tmp/..", nil, 400, "INVALID_FILE"},
		"a file moved from nowhere":        {"POST", "/files/mv", []obj{{"src": "none", "dest": "x"}}, 404, "FILE_NOT_FOUND"},
		"a file moved onto another":        {"POST", "/files/mv", []obj{{"src": "file", "dest": "file"}}, 400, "INVALID_FILE"},
		"permissions of nothing":           {"POST", "/files/permissions", obj{"none": obj{"mode": 600}}, 400, "FILE_NOT_FOUND"},
		"permissions that cannot be":       {"POST", "/files/permissions", obj{"file": obj{"mode": 888}}, 400, "INVALID_REQUEST_BODY"},
		"nothing replaced":                 {"POST", "/files/replace", obj{"file": obj{"old": "", "new": "x"}}, 400, "INVALID_REQUEST_BODY"},
		"replaced nowhere":                 {"POST", "/files/replace", obj{"none": obj{"old": "a", "new": "x"}}, 400, "FILE_NOT_FOUND"},
		"a search for nothing":             {"GET", "/files/search?path=/tmp&pattern=%7B", nil, 400, "MISSING_QUERY"},
		"a search nowhere":                 {"GET", "/files/search?path=none&pattern=*", nil, 404, "FILE_NOT_FOUND"},
		"a listing of nothing":             {"GET", "/directories/list?path=none", nil, 404, "FILE_NOT_FOUND"},
		"a listing of a file":              {"GET", "/directories/list?path=file", nil, 400, "INVALID_FILE"},
		"a listing that is too deep":       {"GET", "/directories/list?path=/tmp&depth=1000", nil, 400, "MISSING_QUERY"},
		"an upload that is none":           {"POST", "/files/upload", "x", 400, "INVALID_FILE"},
		"no terminal":                      {"GET", "/pty/x", nil, 404, "SESSION_NOT_FOUND"},
		"a terminal elsewhere":             {"POST", "/pty", obj{"cwd": "/no/such"}, 400, "INVALID_REQUEST_BODY"},
		"a terminal that nobody has":       {"GET", "/pty/x/ws", nil, 404, "SESSION_NOT_FOUND"},
		"isolation":                        {"GET", "/v1/isolated", nil, 501, "NOT_SUPPORTED"},
		"an isolated session":              {"POST", "/v1/isolated/session", obj{}, 501, "NOT_SUPPORTED"},
		"a user for files that cannot be":  {"GET", "/v1/filesystem/x/0/files/info?path=/", nil, 404, "NOT_SUPPORTED"},
	} {
		t.Run(name, func(t *testing.T) {
			a := w.ask(c.method, c.path, c.body)
			var got struct{ Code, Message string }
			if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != c.status || got.Code != c.code || got.Message == "" || len(got.Message) > 400 {
				t.Fatalf("%d %s %v, want %d %s", a.status, a.body, err, c.status, c.code)
			}
		})
	}
}

func TestUploadsThatAreRefused(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		parts []part
		code  string
	}{
		"no files":                 {nil, "INVALID_FILE"},
		"a file without metadata":  {[]part{{"file", "x"}}, "INVALID_FILE_METADATA"},
		"metadata without a file":  {[]part{{"metadata", `{"path":"a"}`}}, "INVALID_FILE_CONTENT"},
		"metadata twice":           {[]part{{"metadata", `{"path":"a"}`}, {"metadata", `{"path":"a"}`}, {"file", "x"}}, "INVALID_FILE_CONTENT"},
		"too much metadata":        {slices.Repeat([]part{{"metadata", `{"path":"a"}` + strings.Repeat(" ", 60_000)}}, 20), "INVALID_FILE_CONTENT"},
		"metadata that is no JSON": {[]part{{"metadata", `{`}}, "INVALID_FILE_METADATA"},
		"metadata without a path":  {[]part{{"metadata", `{}`}}, "INVALID_FILE_METADATA"},
		"a mode that cannot be":    {[]part{{"metadata", `{"path":"a","mode":999}`}}, "INVALID_FILE_METADATA"},
		"metadata without end":     {[]part{{"metadata", strings.Repeat(" ", 100_000)}}, "INVALID_FILE_METADATA"},
		"a directory":              {[]part{{"metadata", `{"path":"/tmp"}`}, {"file", "x"}}, "INVALID_FILE"},
		"below a file":             {[]part{{"metadata", `{"path":"/etc/passwd/x"}`}, {"file", "x"}}, "INVALID_FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			a := w.upload(c.parts...)
			var got struct{ Code, Message string }
			if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 400 || got.Code != c.code || got.Message == "" {
				t.Fatalf("%d %s %v", a.status, a.body, err)
			}
		})
	}
}

func TestPingAndMetrics(t *testing.T) {
	w := newWorld(t)
	if a := w.ask("GET", "/ping", nil); a.status != 200 || a.header.Get("Content-Length") != "0" {
		t.Fatalf("got %+v", a)
	}
	var m struct {
		CPUs  float64 `json:"cpu_count"`
		CPU   float64 `json:"cpu_used_pct"`
		Total float64 `json:"mem_total_mib"`
		Used  float64 `json:"mem_used_mib"`
		Stamp int64   `json:"timestamp"`
	}
	w.json(w.ask("GET", "/metrics", nil), &m)
	if m.CPUs <= 0 || m.CPU < 0 || m.CPU > 100 || m.Used > m.Total || m.Stamp == 0 {
		t.Fatalf("got %+v", m)
	}
	var c struct{ Available bool }
	w.json(w.ask("GET", "/v1/isolated/capabilities", nil), &c)
	if c.Available {
		t.Fatal("isolated sessions are said to be there")
	}
}

func TestEveryKindOfFailureHasItsStatus(t *testing.T) {
	for _, kind := range fault.Kinds {
		status, code := execd.StatusOf(kind)
		if code == "" || (status == 500) != (kind == fault.Internal) || http.StatusText(status) == "" {
			t.Errorf("%v is %d %s", kind, status, code)
		}
	}
}

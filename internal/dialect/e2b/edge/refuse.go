package edge

import (
	"encoding/json"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// refusal is an answer of the edge's own.
type refusal struct {
	status  int
	message string
	port    int  // told where the port is what is wrong
	plain   bool // code and message only, as envd says it
}

// The SDKs tell these apart by their text.
var (
	notFound     = &refusal{status: http.StatusBadGateway, message: "The sandbox was not found"}
	unauthorized = &refusal{status: http.StatusUnauthorized, plain: true,
		message: "unauthorized access, please provide a valid access token or method signing if supported"}
)

func portClosed(port int) *refusal {
	return &refusal{status: http.StatusBadGateway, message: "The sandbox is running but port is not open", port: port}
}

// asRefusal is the answer to a file URL that names no sandbox.
func asRefusal(err error) *refusal {
	if fault.Is(err, fault.Unauthed) {
		return &refusal{status: http.StatusUnauthorized, message: fault.Message(err), plain: true}
	}
	return &refusal{status: http.StatusServiceUnavailable, message: fault.Message(err), plain: true}
}

// body is in the order in which E2B's own edge writes it.
type body struct {
	Sandbox string `json:"sandboxId"`
	Message string `json:"message"`
	Port    int    `json:"port,omitempty"`
	Code    int    `json:"code"`
}

type plainBody struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// leftGrace is how long net/http may wait for what is left of a refused body.
const leftGrace = 5 * time.Second

// unread lets a refusal go out at once: net/http would wait first for a body that nobody reads, for as long as it stalls.
func unread(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody || r.ProtoMajor != 1 { // of HTTP/2 a stream ends alone, and Close would end the rest
		return
	}
	w.Header().Set("Connection", "close")
	// A writer without deadlines has no connection that could stall.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(leftGrace))
}

// refuse answers with a refusal: people get a page, programs JSON.
func refuse(w http.ResponseWriter, r *http.Request, at route, no *refusal) {
	unread(w, r)
	h := w.Header()
	if at.answered() {
		h.Set("Access-Control-Allow-Origin", "*") // else a page that uses an SDK cannot read why
	}
	h.Set("Cache-Control", "no-store")
	if no.status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	if navigates(r) && !at.answered() {
		page(w, at, no)
		return
	}
	var value any = body{at.id, no.message, no.port, no.status}
	if no.plain || at.id == "" {
		value = plainBody{no.status, no.message}
	}
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // plain data
	}
	h.Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(no.status)
	_, _ = w.Write(text) // the client has gone: nobody to tell
}

// navigates tells a person at a browser from a program.
func navigates(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && strings.Contains(r.Header.Get("Accept"), "text/html")
}

var pageTemplate = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{{.Status}}</title><meta name="viewport" content="width=device-width">
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:20vh auto 0;padding:0 1em}code{background:#8882;padding:.1em .3em}</style></head>
<body><h1>{{.Message}}</h1><p>Sandbox <code>{{.Sandbox}}</code>{{if .Port}}, port <code>{{.Port}}</code>{{end}}. Status {{.Status}}.</p></body>
</html>
`))

func page(w http.ResponseWriter, at route, no *refusal) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	w.WriteHeader(no.status)
	// The client has gone: nobody to tell.
	_ = pageTemplate.Execute(w, struct {
		Sandbox, Message string
		Port, Status     int
	}{at.id, no.message, no.port, no.status})
}

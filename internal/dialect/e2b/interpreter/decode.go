package interpreter

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// maxBody is what a request may have: code of sandbox.MaxCode may become six times as long by escaping.
const maxBody = 6*sandbox.MaxCode + 1<<20

// maxSmall is what a request about contexts may have: the SDKs send no token with it. No budget
// counts it.
const maxSmall = transfer.FreeBody

// execution is what POST /execute asks for.
type execution struct {
	Code     *string            `json:"code"`
	Context  *string            `json:"context_id"`
	Language *string            `json:"language"`
	Env      map[string]*string `json:"env_vars"`
}

// creation is what POST /contexts asks for.
type creation struct {
	Language *string `json:"language"`
	Cwd      *string `json:"cwd"`
}

// decodeExecution reads the body of /execute. What is wrong with it has a status of its own.
func decodeExecution(body []byte) (execution, error) {
	req, err := decode[execution](body)
	if err != nil {
		return req, err
	}
	switch {
	case req.Code == nil:
		return req, &unprocessable{"missing", []string{"body", "code"}, "Field required"}
	case text0(req.Context) != "" && text0(req.Language) != "":
		return req, &refusal{http.StatusBadRequest, "Only one of context_id or language can be provided"}
	case len(*req.Code) > sandbox.MaxCode:
		return req, &refusal{http.StatusRequestEntityTooLarge, "the code is too long"}
	}
	for name, value := range req.Env {
		if value == nil {
			return req, &unprocessable{"string_type", []string{"body", "env_vars", name}, "Input should be a valid string"}
		}
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(*value, "\x00") {
			return req, &refusal{http.StatusBadRequest, "an environment variable has a name or value that no process can have"}
		}
	}
	return req, nil
}

func (e *execution) env() map[string]string {
	if len(e.Env) == 0 {
		return nil
	}
	env := make(map[string]string, len(e.Env))
	for name, value := range e.Env {
		env[name] = *value
	}
	return env
}

// unprocessable is a body of the wrong shape, told as E2B's server tells it.
type unprocessable struct {
	Type string   `json:"type"`
	Loc  []string `json:"loc"`
	Msg  string   `json:"msg"`
}

func (u *unprocessable) Error() string { return strings.Join(u.Loc, ".") + ": " + u.Msg }

func decode[T any](body []byte) (req T, err error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return req, &unprocessable{"missing", []string{"body"}, "Field required"}
	}
	err = json.Unmarshal(body, &req)
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &kind):
		at := []string{"body"}
		if kind.Field != "" {
			at = append(at, strings.Split(kind.Field, ".")...)
		}
		return req, &unprocessable{"type_error", at, "Input should be a valid " + kind.Type.String()}
	case err != nil:
		return req, &unprocessable{"json_invalid", []string{"body"}, "JSON decode error"}
	}
	return req, nil
}

// body reads the whole body, which also lets the server notice when the client leaves.
func (c *call) body() ([]byte, error) {
	r, done := transfer.Patient(c.w, c.r)
	defer done()
	limit := int64(maxBody)
	if c.r.URL.Path != "/execute" {
		limit = maxSmall
	}
	b, err := transfer.ReadJSON(c.ctx(), c.t.Who.Tenant, http.MaxBytesReader(c.w, r.Body, limit))
	var large *http.MaxBytesError
	switch {
	case errors.Is(err, transfer.ErrShare):
		return nil, &refusal{http.StatusTooManyRequests, fault.Message(err)}
	case errors.Is(err, transfer.ErrTotal):
		return nil, &refusal{http.StatusServiceUnavailable, fault.Message(err)}
	case fault.Is(err, fault.Invalid):
		return nil, &refusal{http.StatusBadRequest, fault.Message(err)}
	case errors.As(err, &large):
		return nil, &refusal{http.StatusRequestEntityTooLarge, "the request is too large"}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, &refusal{http.StatusBadRequest, "the request did not come in time"}
	case err != nil:
		return nil, &refusal{http.StatusBadRequest, "the request ended before its time"}
	}
	return b, nil
}

// languageOf takes the short names, too; any case is fine.
func languageOf(name *string) string {
	switch s := strings.ToLower(strings.TrimSpace(text0(name))); s {
	case "":
		return agentapi.LanguagePython
	case "js":
		return agentapi.LanguageJavaScript
	case "ts":
		return agentapi.LanguageTypeScript
	default:
		return s
	}
}

func text0(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

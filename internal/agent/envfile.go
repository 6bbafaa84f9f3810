package agent

import (
	"io"
	"maps"
	"os"
	"strings"

	"github.com/covehq/cove/internal/agentapi"
)

// maxEnvFile bounds what is read of a file of variables: all of it has to fit into one process's environment.
const maxEnvFile = 1 << 20

// withEnvFile is a process's own environment: what the file says, and what the request says, which counts more.
func (a *Agent) withEnvFile(params agentapi.ExecParams, u user) (map[string]string, error) {
	if params.EnvFile == "" {
		return params.Env, nil
	}
	var text []byte
	_ = a.as(u, func() error { // one that is not there, or not to be read, has nothing to say
		fd, err := openRegular(absolute(params.EnvFile, u))
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), params.EnvFile)
		defer f.Close()
		text, err = io.ReadAll(io.LimitReader(f, maxEnvFile))
		return err
	})
	env := parseEnv(string(text))
	if env == nil {
		return params.Env, nil
	}
	maps.Copy(env, params.Env)
	return env, nil
}

// parseEnv reads lines NAME=value; of several with one name the last counts. A value in single quotes is what stands there,
// over several lines too; one in double quotes knows \n, \r, \t, and that a backslash stands for what follows it. What is
// no such line is passed over.
func parseEnv(text string) map[string]string {
	var env map[string]string
	for text != "" {
		name, value, rest, ok := envLine(text)
		text = rest
		if !ok || strings.Contains(value, "\x00") {
			continue
		}
		if env == nil {
			env = map[string]string{}
		}
		env[name] = value
	}
	return env
}

// envLine reads one variable and gives what follows it.
func envLine(text string) (name, value, rest string, ok bool) {
	line, after, _ := strings.Cut(text, "\n")
	line = strings.TrimSuffix(line, "\r")
	name, value, ok = strings.Cut(line, "=")
	name = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(name), "export "))
	if !ok || !shellName(name) {
		return "", "", after, false
	}
	_, raw, _ := strings.Cut(text, "=")
	raw = strings.TrimLeft(raw, " \t")
	switch {
	case strings.HasPrefix(raw, "'"):
		quoted, behind, closed := strings.Cut(raw[1:], "'")
		if !closed {
			return "", "", after, false
		}
		return name, quoted, afterLine(behind), true
	case strings.HasPrefix(raw, `"`):
		quoted, behind, closed := doubleQuoted(raw[1:])
		if !closed {
			return "", "", after, false
		}
		return name, quoted, afterLine(behind), true
	}
	return name, strings.TrimSpace(value), after, true
}

func afterLine(text string) string {
	_, after, _ := strings.Cut(text, "\n")
	return after
}

// escapes are the characters that a backslash makes of others in double quotes.
var escapes = map[byte]byte{'n': '\n', 'r': '\r', 't': '\t'}

func doubleQuoted(text string) (value, rest string, closed bool) {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return b.String(), text[i+1:], true
		case c == '\\' && i+1 < len(text):
			i++
			if meant, known := escapes[text[i]]; known {
				b.WriteByte(meant)
			} else {
				b.WriteByte(text[i])
			}
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}

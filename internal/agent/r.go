package agent

import (
	"bufio"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/agentapi"
)

// statistician makes a kernel of R, which has neither JSON nor a way to use a socket: orders and words are a letter, a length and as
// many bytes. kernel.R knows the same letters.
type statistician struct{ *translator }

// The letters of orders. A value is of the name before it; the code comes last and is run.
const (
	orderName   = 'N'
	orderValue  = 'V'
	orderCwd    = 'C'
	orderSilent = 'S'
	orderCode   = 'X'
)

// The letters of words.
const (
	wordReady   = 'R' // the version
	wordBegin   = 'B'
	wordValue   = 'V' // the text of a value
	wordMain    = 'M' // of the last one
	wordPicture = 'P' // a PNG
	wordError   = 'E' // its name, what it says and lines of its traceback, each ended by a NUL
	wordDone    = 'D' // outcome, milliseconds of CPU, bytes of memory
)

const (
	maxWord  = 9 << 20 // R tells no longer one
	maxEvent = 8 << 20 // encoded; what is longer is left out, as every kernel does it
)

// rKernel starts R.
func (a *Agent) rKernel(params agentapi.KernelStartParams, u user) (*kernel, error) {
	argv, err := a.kernelProgram(params.Language)
	if err != nil {
		return nil, err
	}
	if err := a.needs(params.Language, argv[0], u); err != nil {
		return nil, err
	}
	t, far, err := openTranslator()
	if err != nil {
		return nil, explain(err, "kernel descriptors")
	}
	e := ends{ours: far.ours, theirs: []int{far.null, far.stdout, far.stderr, far.orders, far.words}}
	defer agentapi.CloseDescriptors(e.theirs)
	for _, fd := range []int{far.orders, far.words} {
		_ = syscall.Fchown(fd, u.uid, u.gid) // R opens them by their paths, which only their owner may; one who cannot give them away is that
	}
	s := &statistician{t}
	k, err := a.bear(params, command{argv: argv, cwd: params.Cwd, user: u}, e, s)
	if err != nil {
		s.close()
	}
	return k, err
}

// serve is the kernel: it ends when R does, or when the agent lets go of it.
func (s *statistician) serve(k *kernel) {
	defer s.conn.Close()
	words := bufio.NewReaderSize(s.words, 4<<10)
	kind, version, err := readWord(words)
	if err != nil || kind != wordReady || s.tell(agentapi.Event{Type: agentapi.EventReady, Message: "R " + string(version)}) != nil {
		return
	}
	s.hear(func(req agentapi.KernelRequest) error { return s.run(k, words, req) })
}

func (s *statistician) run(k *kernel, words *bufio.Reader, req agentapi.KernelRequest) error {
	if _, err := s.orders.Write(rOrders(req)); err != nil {
		return err
	}
	for {
		kind, data, err := readWord(words)
		if err != nil {
			return err
		}
		switch kind {
		case wordBegin:
			if s.enter(phaseRunning) {
				k.sigint()
			}
		case wordDone:
			s.enter(phaseIdle)
			return s.tell(agentapi.Event{Type: agentapi.EventEnd, End: rEnd(string(data))})
		default:
			if e, ok := rEvent(kind, data); ok {
				err = s.tell(e)
			}
		}
		if err != nil {
			return err
		}
	}
}

// rOrders is what R reads to run one cell.
func rOrders(req agentapi.KernelRequest) (out []byte) {
	order := func(kind byte, text string) {
		out = append(out, kind)
		out = binary.BigEndian.AppendUint32(out, uint32(len(text)))
		out = append(out, text...)
	}
	for _, name := range slices.Sorted(maps.Keys(req.Env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(req.Env[name], "\x00") {
			continue
		}
		order(orderName, name)
		order(orderValue, req.Env[name])
	}
	if req.Cwd != "" && !strings.Contains(req.Cwd, "\x00") {
		order(orderCwd, req.Cwd)
	}
	if req.Silent {
		order(orderSilent, "")
	}
	order(orderCode, req.Code)
	return out
}

// readWord reads one word. The pipe is open to what a cell starts, so nothing said there is trusted.
func readWord(words *bufio.Reader) (kind byte, data []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(words, head[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[1:])
	if size > maxWord {
		return 0, nil, fmt.Errorf("a word of %d bytes", size)
	}
	data = make([]byte, size)
	_, err = io.ReadFull(words, data)
	return head[0], data, err
}

// rEvent is a word in the words of every other kernel.
func rEvent(kind byte, data []byte) (e agentapi.Event, ok bool) {
	switch kind {
	case wordValue, wordMain:
		return rResult("text/plain", string(data), kind == wordMain), true
	case wordPicture:
		return rResult("image/png", base64.StdEncoding.EncodeToString(data), false), true
	case wordError:
		fields := strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00")
		if len(fields) < 2 {
			return e, false
		}
		return agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: fields[0], Value: fields[1], Traceback: fields[2:]}}, true
	default:
		return e, false
	}
}

func rResult(mime, text string, last bool) agentapi.Event {
	value, _ := json.Marshal(text) // a text can always be one
	if len(value) > maxEvent {
		return rResult("text/plain", fmt.Sprintf("<result left out: %d bytes, over the limit of %d for one event>", len(value), maxEvent), last)
	}
	return agentapi.Event{Type: agentapi.EventResult, Result: &agentapi.Result{Data: map[string]json.RawMessage{mime: value}, Main: last}}
}

// rEnd reads how a cell ended. What is no outcome breaks the protocol, and the agent says so.
func rEnd(text string) *agentapi.End {
	end := &agentapi.End{}
	var cpu float64
	var peak int64
	if n, _ := fmt.Sscan(text, &end.Outcome, &cpu, &peak); n == 3 {
		end.Usage.CPUMS, end.Usage.PeakBytes = cpu, peak<<10
	}
	return end
}

package session

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/diskspace"
)

// The files of a session, in a directory that is its alone.
const (
	logFile      = "session.log"
	metadataFile = "session_metadata.json"
	stateFile    = "python_state.json"
)

// What a line of a log holds at most.
const (
	maxLogCode   = 256 << 10
	maxLogOutput = 64 << 10
	maxLogResult = 16 << 10
	maxLogText   = 4 << 10 // of a message, and of everything else that is told in words
	maxLogName   = 1 << 10
	maxLogFiles  = 100 // artifacts that one line names
	maxLogConfig = 64 << 10
	maxLog       = 256 << 20 // from then on a line tells what happened and nothing about it, and soon only the ends of sandboxes do
	maxLogs      = 4 << 30   // of all sessions of a tenant together: likewise
)

// folder is where a session's files lie. A tenant's name is escaped, so that it is one name of a file.
func (m *Manager) folder(s Session) string { return filepath.Join(m.folders(s.Tenant), s.ID) }

// folders is where those of all of a tenant's sessions lie.
func (m *Manager) folders(tenant string) string {
	return filepath.Join(m.cfg.Dir, "t-"+url.PathEscape(tenant))
}

// shelf is what the logs of a tenant share; they are measured once, while only that tenant waits.
func (m *Manager) shelf(tenant string) (*shelf, error) {
	m.shelving.Lock()
	s := m.shelves[tenant]
	if s == nil {
		s = &shelf{most: m.cfg.MaxLogs, space: m.cfg.Space}
		m.shelves[tenant] = s
	}
	m.shelving.Unlock()
	return s, s.measure(m.folders(tenant))
}

// journal is the log of one session: lines are added by one write each, so that what is read is whole lines and perhaps a torn
// last one.
type journal struct {
	dir  string
	most int64  // bytes of lines that tell everything
	all  *shelf // what it shares with the other logs of its tenant
	seq  int64
	size int64
	last lineHead
	more chan struct{} // closed by the next line
}

// shelf counts the bytes of all logs of one tenant.
type shelf struct {
	most  int64
	space diskspace.Check
	used  atomic.Int64

	measuring sync.Mutex
	measured  bool
}

// measure counts what an earlier server has left, once. A log that is removed meanwhile is none.
func (s *shelf) measure(dir string) error {
	s.measuring.Lock()
	defer s.measuring.Unlock()
	if s.measured {
		return nil
	}
	sessions, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("measure the logs of a tenant: %w", err)
	}
	used := int64(0)
	for _, each := range sessions {
		info, err := os.Lstat(filepath.Join(dir, each.Name(), logFile))
		if err == nil {
			used += info.Size()
		} else if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			return fmt.Errorf("measure the logs of a tenant: %w", err)
		}
	}
	s.used.Add(used)
	s.measured = true
	return nil
}

// lineHead is what of a line is remembered.
type lineHead struct {
	Seq     int64    `json:"seq"`
	Event   LogEvent `json:"event"`
	Sandbox string   `json:"container_id"`
}

// openJournal finds how far a log has come, and cuts off a line that a crash has torn.
func openJournal(dir string, most int64, all *shelf) (*journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of a session: %w", err)
	}
	j := &journal{dir: dir, most: most, all: all, more: make(chan struct{})}
	f, err := os.OpenFile(j.path(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of a session: %w", err)
	}
	defer f.Close()
	last, end, err := lastLine(f)
	if err != nil {
		return nil, fmt.Errorf("read the log of a session: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		err = f.Truncate(end)
	}
	if err != nil {
		return nil, fmt.Errorf("repair the log of a session: %w", err)
	}
	all.used.Add(end - size)
	if len(last) > 0 && json.Unmarshal(last, &j.last) != nil {
		j.last = lineHead{Seq: end} // damaged: a number that no line before it can have
	}
	j.seq, j.size = j.last.Seq, end
	return j, nil
}

// lastLine is the last whole line of a file and where it ends.
func lastLine(f *os.File) (line []byte, end int64, err error) {
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, 0, err
	}
	for room := int64(4 << 10); ; room *= 8 {
		from := max(0, size-room)
		tail := make([]byte, size-from)
		if _, err := f.ReadAt(tail, from); err != nil && !errors.Is(err, io.EOF) {
			return nil, 0, err
		}
		at := bytes.LastIndexByte(tail, '\n')
		begin := bytes.LastIndexByte(tail[:max(at, 0)], '\n') + 1
		if begin > 0 || from == 0 {
			return tail[begin:max(at, 0)], from + int64(at) + 1, nil
		}
	}
}

func (j *journal) path() string { return filepath.Join(j.dir, logFile) }

// add numbers, dates and writes a line, as far as there is room for it. On a disk that is full it is a bare one: what a sandbox
// does goes on, and its log still tells that it did.
func (j *journal) add(line LogLine) error {
	if over := max(fill(j.size, j.most), fill(j.all.used.Load(), j.all.most)); over > 1 {
		if over > 1.1 && !line.ends() {
			return nil
		}
		line = line.bare()
	} else if j.all.space.Allow(0) != nil {
		line = line.bare()
	}
	line = line.clipped()
	line.Seq, line.Time = j.seq+1, time.Now().UTC().Truncate(time.Microsecond)
	text, err := json.Marshal(line)
	if err != nil {
		return fmt.Errorf("write the log of a session: %w", err)
	}
	f, err := os.OpenFile(j.path(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("write the log of a session: %w", err)
	}
	defer f.Close()
	if n, err := f.Write(append(text, '\n')); err != nil {
		_ = f.Truncate(j.size) // a disk that is full has taken a part: what follows begins on a line of its own
		return fmt.Errorf("write the log of a session after %d bytes: %w", n, err)
	}
	j.seq, j.size = line.Seq, j.size+int64(len(text))+1
	j.all.used.Add(int64(len(text)) + 1)
	j.last = lineHead{line.Seq, line.Event, line.Sandbox}
	close(j.more)
	j.more = make(chan struct{})
	return nil
}

// fill is how much of what a log may have it has.
func fill(size, most int64) float64 { return float64(size) / float64(most) }

// ends reports whether a line tells the end of a sandbox.
func (l LogLine) ends() bool { return l.Event == LogStopped || l.Event == LogSandboxLost }

// bare is a line that tells what happened, where and when, and that there was more.
func (l LogLine) bare() LogLine {
	return LogLine{
		Event: l.Event, Sandbox: l.Sandbox, Run: l.Run, Cell: l.Cell, Success: l.Success, Outcome: l.Outcome, ExitCode: l.ExitCode,
		DurationMS: l.DurationMS, CPUMS: l.CPUMS, PeakBytes: l.PeakBytes, Count: l.Count, Cause: l.Cause, Runs: l.Runs, Failed: l.Failed,
		Checkpoint: l.Checkpoint, Truncated: true,
	}
}

// clipped is a line whose words are bounded; code and output are so already.
func (l LogLine) clipped() LogLine {
	for _, text := range []*string{&l.Sandbox, &l.Run, &l.ToolCall, &l.Outcome, &l.Dataset, &l.SHA256, &l.Checkpoint, &l.Cause, &l.Message} {
		most := maxLogText
		if text != &l.Message {
			most = 255
		}
		short, cut := clip(*text, most)
		*text, l.Truncated = short, l.Truncated || cut
	}
	if len(l.Artifacts) > maxLogFiles {
		l.Artifacts, l.Truncated = l.Artifacts[:maxLogFiles], true
	}
	if len(l.Config) > maxLogConfig {
		l.Config, l.Truncated = nil, true
	}
	return l
}

// ended reports whether the last line tells the end of a sandbox.
func (j *journal) ended(sandbox string) bool {
	return j.last.Sandbox == sandbox && LogLine{Event: j.last.Event}.ends()
}

// removed takes in that the log's file is gone.
func (j *journal) removed() {
	j.all.used.Add(-j.size)
	j.size = 0
}

// close wakes those who follow a log that is removed.
func (j *journal) close() { close(j.more) }

// readLines yields the whole lines of a log from an offset on, as they stand there, and the offset behind each.
func readLines(dir string, from int64, yield func(line []byte, next int64) bool) error {
	f, err := os.Open(filepath.Join(dir, logFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the log of a session: %w", err)
	}
	defer f.Close()
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return fmt.Errorf("read the log of a session: %w", err)
	}
	r := bufio.NewReaderSize(f, 64<<10)
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) { // or a line that is not whole yet
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the log of a session: %w", err)
		}
		from += int64(len(line))
		if !yield(bytes.TrimSuffix(line, []byte("\n")), from) {
			return nil
		}
	}
}

// replaceFile writes a file of a session so that a reader sees the old one or the new one.
func replaceFile(dir, name string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	temp := filepath.Join(dir, "."+name+".new") // one writer at a time: a session's files change under its lock
	if err := os.WriteFile(temp, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.Rename(temp, filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// clip shortens text to so many bytes without splitting a character.
func clip(s string, n int) (string, bool) {
	if len(s) <= n {
		return s, false
	}
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n], true
}

package execd

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

const (
	maxPaths   = 10_000   // of one request
	maxReplace = 64 << 20 // bytes of a file whose content is changed
	// maxReplacing is how many requests may change contents at once, each of another sandbox: they have a whole file in memory,
	// and more than once. replaceFor is how long one may take, and wait for its turn.
	maxReplacing = 8
	replaceFor   = time.Minute
)

// fileInfo is a file as clients see it.
type fileInfo struct {
	Path     string    `json:"path"`
	Type     string    `json:"type"`
	Size     int64     `json:"size"`
	Modified time.Time `json:"modified_at"`
	Created  time.Time `json:"created_at"`
	Owner    string    `json:"owner"`
	Group    string    `json:"group"`
	Mode     int       `json:"mode"` // octal digits, read as a decimal number
}

// fileTypes are the only words that clients take.
var fileTypes = map[agentapi.EntryType]string{
	agentapi.EntryFile: "file", agentapi.EntryDir: "directory", agentapi.EntrySymlink: "symlink", agentapi.EntryOther: "other",
}

func infoOf(e *agentapi.Entry) fileInfo {
	info := fileInfo{
		Path: e.Path, Type: fileTypes[e.Type], Size: e.Size, Modified: e.ModTime, Created: e.Born,
		Owner: orNumber(e.User, e.UID), Group: orNumber(e.Group, e.GID), Mode: digits(e.Mode),
	}
	if info.Type == "" {
		info.Type = "other"
	}
	if info.Created.IsZero() {
		info.Created = info.Modified
	}
	return info
}

func orNumber(name string, id int) string {
	if name != "" {
		return name
	}
	return strconv.Itoa(id)
}

// digits writes a mode's octal digits as a decimal number: 0644 is 644.
func digits(mode uint32) int {
	n, _ := strconv.Atoi(strconv.FormatUint(uint64(mode&0o7777), 8)) // octal digits are decimal ones
	return n
}

// modeOf reads a mode that was written so; none is zero.
func modeOf(n *int) (uint32, error) {
	if n == nil {
		return 0, nil
	}
	mode, err := strconv.ParseUint(strconv.Itoa(*n), 8, 32)
	if err != nil || mode > 0o7777 {
		return 0, invalid("mode " + strconv.Itoa(*n) + ": use octal digits as a decimal number, such as 644")
	}
	return uint32(mode), nil
}

// permission is what a request says of a file's owner and mode; what it leaves out stays as it is.
type permission struct {
	Owner *string `json:"owner"`
	Group *string `json:"group"`
	Mode  *int    `json:"mode"`
}

// place is where a request about files acts.
type place struct {
	*agentapi.Client
	home *agentapi.Account
	user string
}

func (h *Handler) place(c *call) (*place, error) {
	home, err := h.home(c)
	if err != nil {
		return nil, err
	}
	agent, err := h.agent(c)
	if err != nil {
		return nil, err
	}
	return &place{agent, home, c.user}, nil
}

// at is a path of a request's, made absolute.
func (p *place) at(name string) (string, error) {
	if name == "" {
		return "", &refusal{http.StatusBadRequest, codeFile, "a path is empty"}
	}
	if strings.Contains(name, "\x00") {
		return "", &refusal{http.StatusBadRequest, codeFile, "a path holds a NUL byte"}
	}
	if name == "~" || strings.HasPrefix(name, "~/") {
		name = "/" + strings.TrimPrefix(p.home.Home, "/") + name[1:]
	}
	return absolute(name, p.home), nil
}

// fileError says whose fault it is that a file cannot be used.
func fileError(err error) error {
	switch fault.KindOf(err) {
	case fault.Invalid:
		return &refusal{http.StatusBadRequest, codeFile, fault.Message(err)}
	case fault.DiskFull:
		return &refusal{http.StatusInsufficientStorage, codeFile, fault.Message(err)}
	default:
		return err
	}
}

// paths are the query parameters path, of which there is at least one.
func (c *call) paths() ([]string, error) {
	list := c.r.URL.Query()["path"]
	switch {
	case len(list) == 0:
		return nil, &refusal{http.StatusBadRequest, codeQuery, "the query parameter path is missing"}
	case len(list) > maxPaths:
		return nil, &refusal{http.StatusBadRequest, codeQuery, "too many paths"}
	}
	return list, nil
}

// each does something with every path of a request's query.
func (h *Handler) each(c *call, do func(p *place, name, at string) error) error {
	list, err := c.paths()
	if err != nil {
		return err
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	for _, name := range list {
		at, err := p.at(name)
		if err == nil {
			err = fileError(do(p, name, at))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) fileInfo(c *call) error {
	found := map[string]fileInfo{}
	err := h.each(c, func(p *place, name, at string) error {
		e, err := p.Stat(c.ctx(), agentapi.PathParams{Path: at, User: p.user})
		found[name] = infoOf(&e)
		return err
	})
	if err != nil {
		return err
	}
	return c.answer(found)
}

func (h *Handler) removeFiles(c *call) error {
	err := h.each(c, func(p *place, _, at string) error {
		e, err := p.Stat(c.ctx(), agentapi.PathParams{Path: at, User: p.user})
		if err == nil && e.Type == agentapi.EntryDir {
			return &refusal{http.StatusBadRequest, codeFile, at + " is a directory"}
		}
		if err == nil {
			err = p.Remove(c.ctx(), agentapi.RemoveParams{Path: at, User: p.user})
		}
		return ignore(err, fault.NotFound)
	})
	if err != nil {
		return err
	}
	return c.nothing()
}

func ignore(err error, kind fault.Kind) error {
	if fault.Is(err, kind) {
		return nil
	}
	return err
}

func (h *Handler) moveFiles(c *call) error {
	var req []struct {
		Src  string `json:"src"`
		Dest string `json:"dest"`
	}
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	for _, item := range req {
		from, err := p.at(item.Src)
		if err != nil {
			return err
		}
		to, err := p.at(item.Dest)
		if err != nil {
			return err
		}
		if _, err := p.Stat(c.ctx(), agentapi.PathParams{Path: from, User: p.user}); err != nil {
			return fileError(err)
		}
		if _, err := p.Stat(c.ctx(), agentapi.PathParams{Path: to, User: p.user}); err == nil {
			return &refusal{http.StatusBadRequest, codeFile, "there is a " + short(to) + " already"}
		}
		if _, err := p.Move(c.ctx(), agentapi.MoveParams{From: from, To: to, User: p.user}); err != nil {
			return fileError(err)
		}
	}
	return c.nothing()
}

func (h *Handler) setPermissions(c *call) error {
	var req map[string]permission
	if err := c.decode(maxBody, true, &req); err != nil {
		return err
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	for name, want := range req {
		at, err := p.at(name)
		if err != nil {
			return err
		}
		mode, err := modeOf(want.Mode)
		if err != nil {
			return err
		}
		if _, err := p.Stat(c.ctx(), agentapi.PathParams{Path: at, User: p.user}); err != nil {
			return fileError(err)
		}
		if err := p.settle(c.ctx(), at, want, mode); err != nil {
			return fileError(err)
		}
	}
	return c.nothing()
}

// settle gives a file its owner and its mode. A user or a group that there is not in the sandbox is passed over: programs
// name those of the images that they know. Files are given away with the rights of the sandbox's root, which whoever calls
// has anyway by a command's uid, unless they have named somebody.
func (p *place) settle(ctx context.Context, at string, want permission, mode uint32) error {
	who := p.user
	if given := want.Owner != nil && *want.Owner != "" || want.Group != nil && *want.Group != ""; given && who == "" {
		who = "root"
	}
	change := func(params agentapi.ChmodParams) error {
		params.Path, params.User = at, who
		_, err := p.Chmod(ctx, params)
		return err
	}
	if want.Owner != nil && *want.Owner != "" {
		if err := change(agentapi.ChmodParams{Owner: *want.Owner}); ignore(err, fault.NotFound) != nil {
			return err
		}
	}
	if want.Group != nil && *want.Group != "" {
		if err := change(agentapi.ChmodParams{Group: *want.Group}); ignore(err, fault.NotFound) != nil {
			return err
		}
	}
	if mode == 0 {
		return nil
	}
	return change(agentapi.ChmodParams{Mode: &mode}) // last: a change of owner takes some bits away
}

func (h *Handler) replaceContents(c *call) error {
	var req map[string]struct {
		Old string `json:"old"`
		New string `json:"new"`
	}
	done, err := take(c.ctx(), c.room.replacing) // before the body is in memory
	if err != nil {
		return err
	}
	defer done()
	if err := c.decode(16*maxBody, true, &req); err != nil {
		return err
	}
	p, err := h.place(c)
	if err != nil {
		return err
	}
	for name, change := range req {
		if change.Old == "" {
			return invalid("there is nothing to look for in " + short(name) + ": old is empty")
		}
	}
	type replaced struct {
		Count int `json:"replacedCount"`
	}
	counts := map[string]replaced{}
	done, err = take(c.ctx(), h.replacing)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(c.ctx(), replaceFor)
	defer cancel()
	for name, change := range req {
		at, err := p.at(name)
		if err != nil {
			return err
		}
		n, err := p.replace(ctx, at, change.Old, change.New)
		if err != nil {
			return fileError(err)
		}
		counts[name] = replaced{n}
	}
	if c.r.URL.Query().Get("verbose") != "true" {
		return c.nothing()
	}
	return c.answer(counts)
}

// take waits for a turn, which ends with done.
func take(ctx context.Context, turns chan struct{}) (done func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, replaceFor)
	defer cancel()
	select {
	case turns <- struct{}{}:
		return func() { <-turns }, nil
	case <-ctx.Done():
		return nil, &refusal{http.StatusTooManyRequests, codeRuntime, "too many contents of files are being changed; try again"}
	}
}

// replace changes every occurrence in a file and tells how many there were.
func (p *place) replace(ctx context.Context, at, old, with string) (int, error) {
	e, content, err := p.Read(ctx, agentapi.ReadParams{Path: at, User: p.user})
	if err != nil {
		return 0, err
	}
	defer content.Close()
	tooLarge := &refusal{http.StatusRequestEntityTooLarge, codeContent, short(at) + " is too large to be changed so: at most 64 MiB"}
	if e.Size > maxReplace {
		return 0, tooLarge
	}
	text, err := io.ReadAll(io.LimitReader(content, maxReplace+1))
	if err != nil {
		return 0, err
	}
	n := bytes.Count(text, []byte(old))
	switch {
	case len(text) > maxReplace, len(text)+n*(len(with)-len(old)) > maxReplace:
		return 0, tooLarge
	case n == 0:
		return 0, nil
	}
	text = bytes.ReplaceAll(text, []byte(old), []byte(with))
	_, err = p.Write(ctx, agentapi.WriteParams{Path: at, User: p.user}, bytes.NewReader(text))
	return n, err
}

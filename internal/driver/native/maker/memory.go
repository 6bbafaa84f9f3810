package maker

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// A branch's memory is that of a fresh child of the zygote plus what the kernel has changed. Which pages those are only
// the host can tell: it compares page frames. What is read here comes from the host's /proc alone; of what a sandbox can
// choose, only the names of mapped files are in it, and they are passed on unread.

// The lists of kernel/native/branch.c: change both.
const (
	branchMagic = 0x6e617262

	opUnmap   = 1
	opAnon    = 2
	opOpen    = 3
	opProtect = 4
	opDrop    = 5
	opCopy    = 6
	opLong    = 7
	opAllow   = 8

	flagShared   = 1
	flagWritable = 2
)

type memoryOp struct {
	Kind, Prot     uint32
	Addr, Len, Off uint64
	A, B           uint64
}

type listHead struct {
	Magic, Count  uint32
	Room, RoomLen uint64
	Brk           uint64
}

var headSize, opSize = binary.Size(listHead{}), binary.Size(memoryOp{})

const (
	page     = 4096
	hugePage = 2 << 20
	// longRun is how much changed memory in one piece goes into a file that branches share.
	longRun = 2 * hugePage
	// maxMaps bounds the text of a process's mappings: the kernel's own bound is 65,530 of them.
	maxMaps = 16 << 20
	// maxLayout is how many pages of address space are compared; a sandbox cannot have much more.
	maxLayout = 64 << 30 / page
	// roomForStack is what cove_become needs beside the lists.
	roomForStack = 64<<10 + 8<<10
	// maxRuns bounds the pieces of memory that are kept in mind; an ordinary kernel has some hundreds.
	maxRuns = 128 << 10
	// maxOpens is MAX_FILES of branch.c.
	maxOpens = 1024
)

// mapping is one line of /proc/PID/maps.
type mapping struct {
	from, to uint64
	prot     uint32
	shared   bool
	off      uint64
	file     string // "dev:inode", empty for anonymous memory
	path     string
}

func (m mapping) special() bool {
	return strings.HasPrefix(m.path, "[v") || m.path == "[uprobes]"
}

// reopens reports whether a file is of the kind that a newborn can open by its name.
func (m mapping) reopens() bool {
	return m.file != "" && strings.HasPrefix(m.path, "/") && !strings.HasSuffix(m.path, " (deleted)") &&
		!strings.HasPrefix(m.path, "/"+longFileName) && !strings.HasPrefix(m.path, "/dev/") && !strings.HasPrefix(m.path, "/memfd:") &&
		!strings.HasPrefix(m.path, "/SYSV") && !strings.ContainsAny(m.path, "\\\x00")
}

// same reports whether two mappings show the same thing at an address, whatever may be done with it.
func (m mapping) same(o mapping, at uint64) bool {
	if m.shared != o.shared || m.file != o.file {
		return false
	}
	return m.file == "" || m.off+at-m.from == o.off+at-o.from
}

// layout is the address space of a process that stands still.
type layout struct {
	maps    []mapping
	pagemap *os.File
	private []run    // where it may have pages of its own
	buf     []uint64 // for pages
}

func (l *layout) close() { l.pagemap.Close() }

// readLayout reads a process's mappings. proc is its directory in /proc, so that it cannot be another's.
func readLayout(proc *os.File) (*layout, error) {
	text, err := openIn(proc, "maps")
	if err != nil {
		return nil, ended(err)
	}
	defer text.Close()
	l := &layout{}
	if l.maps, err = parseMaps(io.LimitReader(text, maxMaps)); err != nil {
		return nil, ended(err)
	}
	pages := uint64(0)
	for _, m := range l.maps {
		if !m.special() && !m.shared {
			pages += (m.to - m.from) / page
		}
	}
	if pages > maxLayout {
		return nil, fault.New(fault.Exhausted, "the kernel has reserved too much address space to be copied")
	}
	if l.pagemap, err = openIn(proc, "pagemap"); err != nil {
		return nil, ended(err)
	}
	return l, l.scan()
}

// ended explains a process that cannot be looked at: nobody else keeps us from it.
func ended(err error) error {
	return fault.Wrap(fault.Unavailable, err, "the kernel's copy, or a branch, has ended before it was done")
}

func openIn(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s of a process: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

var errMaps = errors.New("the mappings of a process cannot be read")

func parseMaps(r io.Reader) ([]mapping, error) {
	var all []mapping
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 64<<10)
	for lines.Scan() {
		m, err := parseMapping(lines.Text())
		if err != nil {
			return nil, err
		}
		if len(all) > 0 && m.from < all[len(all)-1].to {
			return nil, errMaps
		}
		all = append(all, m)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errMaps // of a process that has ended
	}
	return all, nil
}

func parseMapping(line string) (mapping, error) {
	var m mapping
	field := func() string {
		word, rest, _ := strings.Cut(line, " ")
		line = rest
		return word
	}
	from, to, ok := strings.Cut(field(), "-")
	perms := field()
	off, dev, inode := field(), field(), field()
	var errs [4]error
	m.from, errs[0] = strconv.ParseUint(from, 16, 64)
	m.to, errs[1] = strconv.ParseUint(to, 16, 64)
	m.off, errs[2] = strconv.ParseUint(off, 16, 64)
	number, err := strconv.ParseUint(inode, 10, 64)
	errs[3] = err
	if !ok || len(perms) != 4 || errors.Join(errs[:]...) != nil || m.from >= m.to || m.from%page != 0 || m.to%page != 0 {
		return m, errMaps
	}
	for i, bit := range []uint32{unix.PROT_READ, unix.PROT_WRITE, unix.PROT_EXEC} {
		if perms[i] != '-' {
			m.prot |= bit
		}
	}
	m.shared = perms[3] == 's'
	m.path = strings.TrimLeft(line, " ")
	if number != 0 || dev != "00:00" {
		m.file = dev + ":" + inode
	}
	return m, nil
}

// The bits of /proc/PID/pagemap.
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageOfFile  = 1 << 61 // or of shared memory
	frameBits   = 1<<55 - 1
)

// pages reads what is behind a range of addresses; the next call overwrites it.
func (l *layout) pages(from, to uint64) ([]uint64, error) {
	if l.buf == nil {
		l.buf = make([]uint64, chunkPages)
	}
	out := l.buf[:(to-from)/page]
	clear(out)
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&out[0])), len(out)*8)
	if _, err := l.pagemap.ReadAt(raw, int64(from/page*8)); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read page map: %w", err)
	}
	return out, nil
}

// chunkPages bounds how much of a page map is in our memory at once.
const chunkPages = 16 << 10

// scanArg is struct pm_scan_arg of linux/fs.h.
type scanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages uint64
	inverted, mask, anyOf, returned                         uint64
}

type scanRegion struct{ from, to, categories uint64 }

const (
	pagemapScan     = 0xc0606610 // PAGEMAP_SCAN, Linux 6.7
	categoryFile    = 1 << 2
	categoryZero    = 1 << 5 // the page that all who have only read share
	categoryPresent = 1 << 3
	categorySwapped = 1 << 4
)

// scan finds where the process has pages of its own, in one pass: most of an address space is only reserved or shows
// files. A kernel before 6.7 cannot tell, and then all of it is looked at.
func (l *layout) scan() error {
	var most uint64
	for _, m := range l.maps {
		if !m.special() {
			most = m.to
		}
	}
	regions := new([512]scanRegion)
	var pin runtime.Pinner
	pin.Pin(regions) // the kernel is given its address as a number
	defer pin.Unpin()
	for at := l.maps[0].from; at < most; {
		arg := scanArg{
			start: at, end: most, vec: uint64(uintptr(unsafe.Pointer(&regions[0]))), vecLen: uint64(len(regions)),
			inverted: categoryFile | categoryZero, mask: categoryFile | categoryZero, anyOf: categoryPresent | categorySwapped, returned: categoryPresent | categorySwapped,
		}
		arg.size = uint64(unsafe.Sizeof(arg))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, l.pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 || arg.walkEnd <= at {
			l.private = []run{{0, most}}
			return nil
		}
		for _, found := range regions[:n] {
			l.private = addRun(l.private, found.from, found.to)
		}
		if len(l.private) > maxRuns {
			return errScattered
		}
		at = arg.walkEnd
	}
	return nil
}

// populated are the parts of a range that may have pages of the process's own.
func (l *layout) populated(r run) []run {
	var out []run
	first, _ := slices.BinarySearchFunc(l.private, r.from, func(p run, at uint64) int { return cmp.Compare(p.to, at+1) })
	for _, p := range l.private[first:] {
		if p.from >= r.to {
			break
		}
		out = append(out, run{max(p.from, r.from), min(p.to, r.to)})
	}
	return out
}

var none [chunkPages]uint64

// chunks calls f for every piece of a range in which either of two processes has pages. The second may be nil.
func chunks(kernel, other *layout, r run, f func(from uint64, theirs, ours []uint64) error) error {
	where := kernel.populated(r)
	if other != nil {
		where = union(where, other.populated(r))
	}
	for _, w := range where {
		for from := w.from; from < w.to; from += chunkPages * page {
			to := min(w.to, from+chunkPages*page)
			theirs, err := kernel.pages(from, to)
			if err != nil {
				return err
			}
			ours := none[:len(theirs)]
			if other != nil {
				if ours, err = other.pages(from, to); err != nil {
					return err
				}
			}
			if err := f(from, theirs, ours); err != nil {
				return err
			}
		}
	}
	return nil
}

// at returns the mapping that holds an address, from a position on that only grows.
func at(maps []mapping, i *int, addr uint64) *mapping {
	for *i < len(maps) && maps[*i].to <= addr {
		*i++
	}
	if *i < len(maps) && maps[*i].from <= addr {
		return &maps[*i]
	}
	return nil
}

// run is a range of addresses.
type run struct{ from, to uint64 }

// addRun extends the last range or begins another.
func addRun(runs []run, from, to uint64) []run {
	if n := len(runs); n > 0 && runs[n-1].to == from {
		runs[n-1].to = to
		return runs
	}
	return append(runs, run{from, to})
}

// memory is what makes a newborn a copy.
type memory struct {
	ops   []memoryOp // the newborn's plan
	paths []byte     // of files that it opens
	opens int
	copy  []run      // what must be copied
	pages int        // in copy
	allow []memoryOp // what the copy must be able to read
}

func (m *memory) take(at uint64) error {
	m.copy = addRun(m.copy, at, at+page)
	m.pages++
	if len(m.copy) > maxRuns {
		return errScattered
	}
	return nil
}

var errScattered = fault.New(fault.Exhausted, "the kernel's memory is in too many pieces to be copied")

// compare says how a newborn becomes a copy of a kernel. Both stand still.
func compare(kernel, newborn *layout) (*memory, error) {
	m := &memory{}
	var ki, ni int
	for _, edge := range edges(kernel.maps, newborn.maps) {
		k, n := at(kernel.maps, &ki, edge.from), at(newborn.maps, &ni, edge.from)
		if k != nil && k.special() || n != nil && n.special() {
			continue
		}
		var err error
		switch {
		case k == nil && n == nil:
		case k == nil:
			m.ops = append(m.ops, memoryOp{Kind: opUnmap, Addr: edge.from, Len: edge.to - edge.from})
		case n != nil && k.same(*n, edge.from) && !k.shared:
			err = m.changed(kernel, newborn, *k, *n, edge)
		case n != nil && k.same(*n, edge.from) && k.prot == n.prot:
		default:
			err = m.fresh(kernel, *k, edge)
		}
		if err != nil {
			return nil, err
		}
	}
	return m, nil
}

// edges cuts the address space where anything begins or ends in either.
func edges(a, b []mapping) []run {
	var cuts []uint64
	i, j := 0, 0
	points := func(maps []mapping) []uint64 {
		out := make([]uint64, 0, 2*len(maps))
		for _, m := range maps {
			out = append(out, m.from, m.to)
		}
		return out
	}
	x, y := points(a), points(b)
	for i < len(x) || j < len(y) {
		var next uint64
		if j == len(y) || i < len(x) && x[i] <= y[j] {
			next, i = x[i], i+1
		} else {
			next, j = y[j], j+1
		}
		if len(cuts) == 0 || cuts[len(cuts)-1] != next {
			cuts = append(cuts, next)
		}
	}
	var out []run
	for k := 1; k < len(cuts); k++ {
		out = append(out, run{cuts[k-1], cuts[k]})
	}
	return out
}

// changed compares a range that both have page by page.
func (m *memory) changed(kernel, newborn *layout, k, n mapping, r run) error {
	before := m.pages
	var drop []run
	err := chunks(kernel, newborn, r, func(from uint64, theirs, ours []uint64) error {
		for i := range theirs {
			at := from + uint64(i)*page
			switch verdict(theirs[i], ours[i]) {
			case pageCopy:
				if err := m.take(at); err != nil {
					return err
				}
			case pageDrop:
				drop = addRun(drop, at, at+page)
			case pageSame:
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, d := range drop {
		m.ops = append(m.ops, memoryOp{Kind: opDrop, Addr: d.from, Len: d.to - d.from})
	}
	copies := m.pages > before
	if copies && n.prot&unix.PROT_WRITE == 0 {
		m.ops = append(m.ops, memoryOp{Kind: opAllow, Addr: r.from, Len: r.to - r.from, Prot: unix.PROT_READ | unix.PROT_WRITE})
	}
	if k.prot != n.prot || copies && n.prot&unix.PROT_WRITE == 0 {
		m.ops = append(m.ops, memoryOp{Kind: opProtect, Addr: r.from, Len: r.to - r.from, Prot: k.prot})
	}
	if copies {
		m.readable(k, r)
	}
	return nil
}

// readable lets the copy read what it must write out.
func (m *memory) readable(k mapping, r run) {
	if k.prot&unix.PROT_READ == 0 {
		m.allow = append(m.allow, memoryOp{Kind: opAllow, Addr: r.from, Len: r.to - r.from, Prot: k.prot})
	}
}

type pageVerdict int

const (
	pageSame pageVerdict = iota
	pageCopy
	pageDrop
)

// verdict compares one page: the kernel's and the newborn's.
func verdict(theirs, ours uint64) pageVerdict {
	if theirs == ours && theirs&frameBits != 0 {
		return pageSame
	}
	private := func(p uint64) bool { return p&pageSwapped != 0 || p&pagePresent != 0 && p&pageOfFile == 0 }
	switch {
	case private(theirs):
		if theirs&pageSwapped == 0 && ours&pagePresent != 0 && theirs&frameBits == ours&frameBits && theirs&frameBits != 0 {
			return pageSame
		}
		return pageCopy
	case private(ours):
		return pageDrop // the kernel has what the file has, or nothing
	}
	return pageSame
}

// fresh makes a range that the newborn does not have, or has otherwise.
func (m *memory) fresh(kernel *layout, k mapping, r run) error {
	if k.path == "[stack]" {
		return m.present(kernel, r) // it grows by being written to
	}
	op := memoryOp{Kind: opAnon, Addr: r.from, Len: r.to - r.from, Prot: k.prot}
	if k.shared {
		op.B |= flagShared
	}
	whole := k.file != "" || k.shared
	if k.reopens() {
		if m.opens++; m.opens > maxOpens {
			return fault.New(fault.Exhausted, "the kernel has more than %d files mapped", maxOpens)
		}
		op.Kind, op.Off, op.A = opOpen, k.off+r.from-k.from, uint64(len(m.paths))
		if k.shared && k.prot&unix.PROT_WRITE != 0 {
			op.B |= flagWritable
		}
		m.paths = append(append(m.paths, k.path...), 0)
		whole = false
	}
	at := len(m.ops)
	m.ops = append(m.ops, op)
	if k.shared && op.Kind == opOpen {
		return nil // what it shows is in the file
	}
	before := m.pages
	if whole {
		m.copy = addRun(m.copy, r.from, r.to)
		m.pages++
	} else if err := m.present(kernel, r); err != nil {
		return err
	}
	copies := m.pages > before
	if copies && k.prot&unix.PROT_WRITE == 0 {
		m.ops[at].Prot = unix.PROT_READ | unix.PROT_WRITE
		m.ops = append(m.ops, memoryOp{Kind: opProtect, Addr: r.from, Len: r.to - r.from, Prot: k.prot})
	}
	if copies {
		m.readable(k, r)
	}
	return nil
}

// present adds the pages that a kernel has of its own in a range.
func (m *memory) present(kernel *layout, r run) error {
	return chunks(kernel, nil, r, func(from uint64, theirs, ours []uint64) error {
		for i, p := range theirs {
			if verdict(p, ours[i]) != pageCopy {
				continue
			}
			if err := m.take(from + uint64(i)*page); err != nil {
				return err
			}
		}
		return nil
	})
}

// longRuns finds the long pieces of ordinary memory that a kernel has and a process before it has not.
func longRuns(kernel, base *layout) ([]run, error) {
	var all []run
	i := 0
	for _, k := range kernel.maps {
		if k.to-k.from < longRun || !k.plain() {
			continue
		}
		for _, edge := range edges([]mapping{k}, base.maps) {
			if edge.from < k.from || edge.to > k.to {
				continue
			}
			var other *layout
			if b := at(base.maps, &i, edge.from); b != nil && b.same(k, edge.from) {
				other = base
			}
			var found []run
			if k.file != "" {
				found = []run{edge}
			} else if err := chunks(kernel, other, edge, func(from uint64, theirs, ours []uint64) error {
				for n, p := range theirs {
					if verdict(p, ours[n]) == pageCopy {
						found = addRun(found, from+uint64(n)*page, from+uint64(n+1)*page)
					}
				}
				return nil
			}); err != nil {
				return nil, err
			}
			all = append(all, found...)
		}
	}
	_, long := split(all)
	return long, nil
}

// neighbours is the stretch of plain mappings without a gap that one is in: advice that was given for a part of what malloc
// has mapped makes several of it.
func neighbours(maps []mapping, i int) run {
	first, last := i, i
	for first > 0 && maps[first-1].to == maps[first].from && maps[first-1].plain() {
		first--
	}
	for last+1 < len(maps) && maps[last+1].from == maps[last].to && maps[last+1].plain() {
		last++
	}
	return run{maps[first].from, maps[last].to}
}

// plain reports whether branches may share a mapping's long pieces: it is what malloc or the interpreter has mapped, or
// such a piece of an earlier branch's.
func (m mapping) plain() bool {
	return !m.shared && m.prot == unix.PROT_READ|unix.PROT_WRITE && m.path != "[stack]" &&
		(m.file == "" || strings.HasPrefix(m.path, "/"+longFileName))
}

// room finds addresses that are free in both.
func room(size uint64, layouts ...*layout) (uint64, error) {
	size = (size + hugePage - 1) &^ (hugePage - 1)
	var maps []mapping
	for _, l := range layouts {
		maps = append(maps, l.maps...)
	}
	// Far below where the kernel puts mappings, above any program: nearly always free.
	for at := uint64(0x100000000000); at < 0x500000000000; at += 1 << 36 {
		free := true
		for _, m := range maps {
			if m.from < at+size && m.to > at {
				free = false
				break
			}
		}
		if free {
			return at, nil
		}
	}
	return 0, fault.New(fault.Exhausted, "the kernel's address space has no room left")
}

// split takes what is long out of a list of ranges.
func split(runs []run) (short, long []run) {
	for _, r := range runs {
		from, to := (r.from+hugePage-1)&^(hugePage-1), r.to&^(hugePage-1)
		if r.to-r.from < longRun || from >= to {
			short = append(short, r)
			continue
		}
		// A piece at an end is worth a huge page of its own when it fills most of it.
		if from-r.from >= hugePage/2 {
			from = r.from
		}
		if r.to-to >= hugePage/2 {
			to = r.to
		}
		if r.from < from {
			short = append(short, run{r.from, from})
		}
		long = append(long, run{from, to})
		if to < r.to {
			short = append(short, run{to, r.to})
		}
	}
	return short, long
}

// subtract takes ranges out of others; both are sorted.
func subtract(runs, out []run) []run {
	var left []run
	i := 0
	for _, r := range runs {
		for i < len(out) && out[i].to <= r.from {
			i++
		}
		for j := i; r.from < r.to; j++ {
			if j == len(out) || out[j].from >= r.to {
				left = append(left, r)
				break
			}
			if out[j].from > r.from {
				left = append(left, run{r.from, out[j].from})
			}
			r.from = max(r.from, out[j].to)
		}
	}
	return left
}

// union merges sorted ranges.
func union(a, b []run) []run {
	var out []run
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		var next run
		if j == len(b) || i < len(a) && a[i].from <= b[j].from {
			next, i = a[i], i+1
		} else {
			next, j = b[j], j+1
		}
		if n := len(out); n > 0 && next.from <= out[n-1].to {
			out[n-1].to = max(out[n-1].to, next.to)
		} else {
			out = append(out, next)
		}
	}
	return out
}

func runsBytes(runs []run) (n uint64) {
	for _, r := range runs {
		n += r.to - r.from
	}
	return n
}

// listFile makes a nameless file in memory that holds a list, with room for so many bytes more behind it.
func listFile(head listHead, ops []memoryOp, tail []byte, more uint64) (*os.File, error) {
	head.Magic, head.Count = branchMagic, uint32(len(ops))
	var b bytes.Buffer
	for _, part := range []any{head, ops, tail} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			return nil, err
		}
	}
	fd, err := unix.MemfdCreate("cove-branch", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("cove-branch", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "list")
	if err := f.Truncate(listSize(len(ops), len(tail)) + int64(more)); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.WriteAt(b.Bytes(), 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// listSize is where the data behind a list begin.
func listSize(ops, tail int) int64 {
	n := int64(headSize + ops*opSize + tail)
	return (n + page - 1) &^ (page - 1)
}

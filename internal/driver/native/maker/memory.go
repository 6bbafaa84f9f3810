package maker

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// A copy of a kernel's memory is its own, but for two things that a fork does not copy: memory that was mapped to be
// shared, and files of the sandbox that it came from. Which those are the host tells: of what is read here a sandbox
// chooses only the names of mapped files, and they are passed on unread.

// graftOp is struct op of shell/graft.c: change both.
type graftOp struct {
	Kind, Prot     uint32
	Addr, Len, Off uint64
	Path, Keep     uint32
}

const (
	opShare      = 1
	opOwn        = 2
	opOpen       = 3
	opOpenShared = 4
	opKeep       = 5
)

const (
	page = 4096
	// maxMaps bounds the text of a process's mappings: the kernel's own bound is 65,530 of them.
	maxMaps = 16 << 20
	// maxOps and maxPaths bound what a branch is told to do; a kernel with every library there is has some hundreds.
	maxOps   = 16 << 10
	maxPaths = 1 << 20
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
	return m.file == "" && (strings.HasPrefix(m.path, "[v") || m.path == "[uprobes]")
}

// reopens reports whether a file is of the kind that a branch can open by its name.
func (m mapping) reopens() bool {
	return m.file != "" && strings.HasPrefix(m.path, "/") && !strings.HasSuffix(m.path, " (deleted)") && !strings.HasPrefix(m.path, "/dev/") && !strings.HasPrefix(m.path, "/memfd:") &&
		!strings.HasPrefix(m.path, "/SYSV") && !strings.ContainsAny(m.path, "\\\x00")
}

// same reports whether two mappings show the same thing at an address, whatever may be done with it.
func (m mapping) same(o mapping, at uint64) bool {
	if m.shared != o.shared || m.file != o.file {
		return false
	}
	return m.file == "" || m.off+at-m.from == o.off+at-o.from
}

// readMaps reads a process's mappings, but for those whose lines are known.
func readMaps(pid int, known map[string]bool) ([]mapping, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return nil, ended(err)
	}
	defer f.Close()
	maps, err := parseMaps(io.LimitReader(f, maxMaps), known)
	if err != nil {
		return nil, ended(err)
	}
	return maps, nil
}

// zygoteMaps are what a zygote's children begin with.
type zygoteMaps struct {
	all  []mapping
	kept map[string]bool // the lines of those that a branch may have as they are
}

func readZygote(pid int) (*zygoteMaps, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return nil, ended(err)
	}
	z := &zygoteMaps{kept: map[string]bool{}}
	if z.all, err = parseMaps(bytes.NewReader(text), nil); err != nil {
		return nil, ended(err)
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if m, err := parseMapping(line); err == nil && m.remains(&m) {
			z.kept[line] = true
		}
	}
	return z, nil
}

// remains tells whether a branch may have a mapping as it is, given what the zygote has there.
func (m mapping) remains(z *mapping) bool {
	if m.special() || m.file == "" && !m.shared {
		return true
	}
	return z != nil && m.same(*z, m.from) && (!m.shared || m.reopens() && m.prot&unix.PROT_WRITE == 0)
}

// ended explains a process that cannot be looked at: nobody else keeps us from it.
func ended(err error) error {
	return fault.Wrap(fault.Unavailable, err, "the kernel has ended before it was copied")
}

var errMaps = errors.New("the mappings of a process cannot be read")

func parseMaps(r io.Reader, known map[string]bool) ([]mapping, error) {
	var all []mapping
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 64<<10)
	some := false
	for lines.Scan() {
		some = true
		if known[string(lines.Bytes())] {
			continue
		}
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
	if !some {
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

// parting is what a branch does to have nothing in common with the kernel that it was copied from.
type parting struct {
	ops    []graftOp
	paths  []byte // of files that it opens, each with a zero behind it
	copies uint64 // bytes of memory that it makes anew
}

var errScattered = fault.New(fault.Exhausted, "the kernel has too many files mapped to be copied")

// look is how a process's memory is looked at.
type look struct {
	written func(run) ([]run, error) // which pages of a range are not the file's any more
	shown   func(mapping) uint64     // the address where a mapping goes beyond the end of its file
}

// part compares a kernel's mappings with those of the zygote that it came from: what is the same is nobody's but theirs,
// and nobody can write to it.
func part(kernel, zygote []mapping, look look) (*parting, error) {
	p := &parting{}
	var ki, zi int
	for _, edge := range edges(kernel, zygote) {
		k, z := at(kernel, &ki, edge.from), at(zygote, &zi, edge.from)
		if k == nil || k.remains(z) {
			continue
		}
		if err := p.add(*k, edge, look); err != nil {
			return nil, err
		}
		if len(p.ops) > maxOps || len(p.paths) > maxPaths {
			return nil, errScattered
		}
	}
	return p, nil
}

func (p *parting) add(k mapping, r run, look look) error {
	op := graftOp{Kind: opOwn, Prot: k.prot, Addr: r.from, Len: r.to - r.from}
	if k.shared {
		op.Kind = opShare
	}
	if !k.reopens() {
		p.copies += op.Len
		op.Off = min(max(look.shown(k), r.from), r.to) - r.from // so much of it can be read
		p.ops = append(p.ops, op)
		return nil
	}
	op.Off, op.Path = k.off+r.from-k.from, uint32(len(p.paths))
	p.paths = append(append(p.paths, k.path...), 0)
	if k.shared {
		op.Kind = opOpenShared // what it shows is in the file
		p.ops = append(p.ops, op)
		return nil
	}
	op.Kind = opOpen
	kept, err := look.written(r)
	if err != nil {
		return err
	}
	op.Keep = uint32(len(kept))
	p.ops = append(p.ops, op)
	for _, w := range kept {
		p.ops = append(p.ops, graftOp{Kind: opKeep, Addr: w.from, Len: w.to - w.from})
	}
	return nil
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

// scanArg is struct pm_scan_arg of linux/fs.h.
type scanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages uint64
	inverted, mask, anyOf, returned                         uint64
}

type scanRegion struct{ from, to, categories uint64 }

const (
	pagemapScan     = 0xc0606610 // PAGEMAP_SCAN, Linux 6.7
	categoryFile    = 1 << 2
	categoryPresent = 1 << 3
	categorySwapped = 1 << 4

	// The bits of /proc/PID/pagemap.
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageOfFile  = 1 << 61
)

// writtenBy finds the pages of a range that a process has of its own where it maps a file.
func writtenBy(pagemap *os.File) func(run) ([]run, error) {
	return func(r run) (found []run, err error) {
		regions := new([64]scanRegion)
		var pin runtime.Pinner
		pin.Pin(regions) // the host is given its address as a number
		defer pin.Unpin()
		for at := r.from; at < r.to; {
			arg := scanArg{
				start: at, end: r.to, vec: uint64(uintptr(unsafe.Pointer(&regions[0]))), vecLen: uint64(len(regions)),
				inverted: categoryFile, mask: categoryFile, anyOf: categoryPresent | categorySwapped, returned: categoryPresent,
			}
			arg.size = uint64(unsafe.Sizeof(arg))
			n, _, errno := unix.Syscall(unix.SYS_IOCTL, pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
			if errno != 0 || arg.walkEnd <= at {
				return readWritten(pagemap, r) // before 6.7
			}
			for _, region := range regions[:n] {
				found = addRun(found, region.from, region.to)
			}
			at = arg.walkEnd
		}
		return found, nil
	}
}

// shownBy looks at the size of mapped files. The host leads to the file itself, whatever has become of its name.
func shownBy(pid int) func(mapping) uint64 {
	return func(m mapping) uint64 {
		var st unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.from, m.to), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return m.to
		}
		size := (uint64(st.Size) + page - 1) &^ (page - 1)
		return m.from + size - min(m.off, size)
	}
}

func readWritten(pagemap *os.File, r run) (found []run, err error) {
	entries := make([]uint64, min((r.to-r.from)/page, 16<<10))
	for at := r.from; at < r.to; at += uint64(len(entries)) * page {
		entries = entries[:min(uint64(len(entries)), (r.to-at)/page)]
		raw := unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), len(entries)*8)
		if _, err := pagemap.ReadAt(raw, int64(at/page*8)); err != nil {
			return nil, fmt.Errorf("read page map: %w", err)
		}
		for i, e := range entries {
			if e&pageSwapped != 0 || e&pagePresent != 0 && e&pageOfFile == 0 {
				from := at + uint64(i)*page
				found = addRun(found, from, from+page)
			}
		}
	}
	return found, nil
}

// ownBytes is the memory that a process has beside files.
func ownBytes(pid int) (uint64, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0, ended(err)
	}
	var size, resident, shared uint64
	if _, err := fmt.Sscan(string(text), &size, &resident, &shared); err != nil {
		return 0, ended(err)
	}
	return (resident - min(shared, resident)) * page, nil
}

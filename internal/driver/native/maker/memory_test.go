package maker // inside: nothing of this has a name outside

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

func TestGraftIsLaidOutAsItIsRead(t *testing.T) {
	graft, err := filepath.Abs("shell/graft.c")
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(t.TempDir(), "size.c")
	// The compiler itself compares. What is written is packed, so Go's own offsets are those only where nothing is padded.
	text := fmt.Sprintf("#include %q\n", graft)
	for what, want := range map[string]int{
		"sizeof(struct op)": binary.Size(graftOp{}), "sizeof(struct graft)": binary.Size(graftHead{}),
		"sizeof(struct op) + 0": int(unsafe.Sizeof(graftOp{})), "sizeof(struct graft) + 0": int(unsafe.Sizeof(graftHead{})),
		"SHARE": opShare, "OWN": opOwn, "OPEN": opOpen, "OPEN_SHARED": opOpenShared, "KEEP": opKeep,
		"__builtin_offsetof(struct op, prot)": int(unsafe.Offsetof(graftOp{}.Prot)), "__builtin_offsetof(struct op, addr)": int(unsafe.Offsetof(graftOp{}.Addr)),
		"__builtin_offsetof(struct op, len)": int(unsafe.Offsetof(graftOp{}.Len)), "__builtin_offsetof(struct op, off)": int(unsafe.Offsetof(graftOp{}.Off)),
		"__builtin_offsetof(struct op, path)": int(unsafe.Offsetof(graftOp{}.Path)), "__builtin_offsetof(struct op, keep)": int(unsafe.Offsetof(graftOp{}.Keep)),
		"__builtin_offsetof(struct graft, resume)": int(unsafe.Offsetof(graftHead{}.Resume)), "__builtin_offsetof(struct graft, room)": int(unsafe.Offsetof(graftHead{}.Room)),
		"__builtin_offsetof(struct graft, size)": int(unsafe.Offsetof(graftHead{}.Size)), "__builtin_offsetof(struct graft, word)": int(unsafe.Offsetof(graftHead{}.Word)),
		"__builtin_offsetof(struct graft, uid)": int(unsafe.Offsetof(graftHead{}.UID)), "__builtin_offsetof(struct graft, gid)": int(unsafe.Offsetof(graftHead{}.GID)),
		"__builtin_offsetof(struct graft, filter)": int(unsafe.Offsetof(graftHead{}.Filter)), "__builtin_offsetof(struct graft, filter_len)": int(unsafe.Offsetof(graftHead{}.FilterLen)),
		"__builtin_offsetof(struct graft, ops)": int(unsafe.Offsetof(graftHead{}.Ops)), "__builtin_offsetof(struct graft, ops_len)": int(unsafe.Offsetof(graftHead{}.OpsLen)),
		"__builtin_offsetof(struct graft, pidfd)": int(unsafe.Offsetof(graftHead{}.PidFD)), "__builtin_offsetof(struct graft, error)": int(unsafe.Offsetof(graftHead{}.Error)),
		"__builtin_offsetof(struct graft, fd)": int(unsafe.Offsetof(graftHead{}.FD)),
		"3 * STACK":                            graftStacks,
	} {
		text += fmt.Sprintf("_Static_assert(%s == %d, \"%s\");\n", what, want, what)
	}
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-ffreestanding", "-fsyntax-only", "-w", source).CombinedOutput(); err != nil {
		t.Errorf("graft.c and the maker differ: %v\n%s", err, out)
	}
}

func TestParseMaps(t *testing.T) {
	const rw = unix.PROT_READ | unix.PROT_WRITE
	text := `00400000-00401000 r-xp 00001000 fe:01 1234                               /usr/bin/python3
00500000-00502000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000001000 ---p 00000000 00:00 0 
7f0000001000-7f0000003000 rw-s 00002000 00:2f 7                          /home/user/a name  with spaces
7f0000003000-7f0000004000 r--p 00000000 00:2f 8                          /home/user/a\012line and \134 more (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:01 1029                       /dev/zero (deleted)
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
7ffc00030000-7ffc00034000 r--p 00000000 00:00 0                          [vvar]
7ffc00034000-7ffc00036000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
`
	got, err := parseMaps(strings.NewReader(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []mapping{
		{from: 0x400000, to: 0x401000, prot: unix.PROT_READ | unix.PROT_EXEC, off: 0x1000, file: "fe:01:1234", path: "/usr/bin/python3"},
		{from: 0x500000, to: 0x502000, prot: rw, path: "[heap]"},
		{from: 0x7f0000000000, to: 0x7f0000001000},
		{from: 0x7f0000001000, to: 0x7f0000003000, prot: rw, shared: true, off: 0x2000, file: "00:2f:7", path: "/home/user/a name  with spaces"},
		{from: 0x7f0000003000, to: 0x7f0000004000, prot: unix.PROT_READ, file: "00:2f:8", path: `/home/user/a\012line and \134 more (deleted)`},
		{from: 0x7f0000004000, to: 0x7f0000005000, prot: rw, shared: true, file: "00:01:1029", path: "/dev/zero (deleted)"},
		{from: 0x7ffc00000000, to: 0x7ffc00021000, prot: rw, path: "[stack]"},
		{from: 0x7ffc00030000, to: 0x7ffc00034000, prot: unix.PROT_READ, path: "[vvar]"},
		{from: 0x7ffc00034000, to: 0x7ffc00036000, prot: unix.PROT_READ | unix.PROT_EXEC, path: "[vdso]"},
		{from: 0xffffffffff600000, to: 0xffffffffff601000, prot: unix.PROT_EXEC, path: "[vsyscall]"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mapping{})); diff != "" {
		t.Error(diff)
	}
	type kinds struct{ special, reopens bool }
	var is []kinds
	for _, m := range got {
		is = append(is, kinds{m.special(), m.reopens()})
	}
	if diff := cmp.Diff([]kinds{
		{reopens: true}, {}, {}, {reopens: true}, {}, {}, {}, {special: true}, {special: true}, {special: true},
	}, is, cmp.AllowUnexported(kinds{})); diff != "" {
		t.Error(diff)
	}
}

// TestHostileFileNames are mapped by a sandbox that means harm: a name must not pass for a line, a kind of memory, or another
// file's name.
func TestHostileFileNames(t *testing.T) {
	for _, c := range []struct {
		path    string
		reopens bool
	}{
		{"/home/user/[stack]", true}, {"/home/user/[vdso]", true}, {"/home/user/x (deleted)", false}, {"/home/user/ leading", true},
		{`/home/user/line\01200400000-00401000 r-xp 0 0:0 0 /etc/shadow`, false}, {`/home/user/back\134slash`, false},
		{"/dev/shm/x", false}, {"/memfd:x (deleted)", false}, {"/memfd:x", false}, {"/dev/zero (deleted)", false},
		{"/SYSV00000000 (deleted)", false}, {"/SYSVx", false}, {"/home/user/" + strings.Repeat("é", 1000), true},
		{"socket:[1]", false}, {"anon_inode:[io_uring]", false}, {"(unreachable)/x", false},
	} {
		m, err := parseMapping("7f0000001000-7f0000003000 rw-p 00002000 00:2f 7 " + strings.Repeat(" ", 10) + c.path)
		if err != nil {
			t.Errorf("%q: %v", c.path, err)
			continue
		}
		if m.path != c.path || m.special() || m.file != "00:2f:7" || m.reopens() != c.reopens {
			t.Errorf("%q is %q, special %t, reopens %t", c.path, m.path, m.special(), m.reopens())
		}
	}
	for _, line := range []string{
		"", "x", "1000-2000", "1000-2000 rw-p", "1000-2000 rw-p 0 00:00", "1000-2000 rw 0 00:00 0", "1000-2000 rw-p zz 00:00 0", "1000-2000 rw-p 0 00:00 x",
		"2000-1000 rw-p 0 00:00 0", "1000-1000 rw-p 0 00:00 0", "1001-2000 rw-p 0 00:00 0", "1000-2001 rw-p 0 00:00 0", "-1000-2000 rw-p 0 00:00 0",
		"11000000000000000-12000000000000000 rw-p 0 00:00 0", " 1000-2000 rw-p 0 00:00 0", "1000-2000  rw-p 0 00:00 0",
	} {
		if m, err := parseMapping(line); err == nil {
			t.Errorf("%q is read as %+v", line, m)
		}
	}
	for _, text := range []string{"", "1000-2000 rw-p 0 00:00 0\n1000-2000 rw-p 0 00:00 0\n", "2000-3000 rw-p 0 00:00 0\n1000-2000 rw-p 0 00:00 0\n", "1000-2000 rw-p 0 00:00 0\n" + strings.Repeat("x", 100<<10)} {
		if m, err := parseMaps(strings.NewReader(text), nil); err == nil {
			t.Errorf("%.40q is read as %+v", text, m)
		}
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add("00400000-00401000 r-xp 00001000 fe:01 1234      /usr/bin/python3\n7f0000000000-7f0000001000 rw-p 0 00:00 0\n")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parseMaps(strings.NewReader(text), nil)
		if err != nil {
			return
		}
		for i, m := range all {
			if m.from >= m.to || m.from%page != 0 || m.to%page != 0 || i > 0 && m.from < all[i-1].to {
				t.Errorf("%+v", all)
			}
		}
		for _, r := range edges(all, all[:len(all)/2]) {
			if r.from >= r.to {
				t.Errorf("%+v", r)
			}
		}
		if _, err := part(all, all[:len(all)/2], whole(func(r run) ([]run, error) { return []run{r}, nil })); err != nil && !errors.Is(err, errScattered) {
			t.Error(err)
		}
	})
}

func TestEdges(t *testing.T) {
	m := func(spans ...uint64) (out []mapping) {
		for i := 0; i < len(spans); i += 2 {
			out = append(out, mapping{from: spans[i], to: spans[i+1]})
		}
		return out
	}
	for _, c := range []struct {
		a, b []mapping
		want []run
	}{
		{nil, nil, nil},
		{m(1, 5), nil, []run{{1, 5}}},
		{m(1, 5), m(1, 5), []run{{1, 5}}},
		{m(1, 5), m(3, 8), []run{{1, 3}, {3, 5}, {5, 8}}},
		{m(1, 9), m(3, 5), []run{{1, 3}, {3, 5}, {5, 9}}},
		{m(1, 3, 5, 7), m(2, 6), []run{{1, 2}, {2, 3}, {3, 5}, {5, 6}, {6, 7}}},
		{m(1, 3, 3, 7), m(3, 7), []run{{1, 3}, {3, 7}}},
		{m(5, 6), m(1, 2), []run{{1, 2}, {2, 5}, {5, 6}}},
	} {
		if diff := cmp.Diff(c.want, edges(c.a, c.b), cmp.AllowUnexported(run{})); diff != "" {
			t.Errorf("%v %v: %s", c.a, c.b, diff)
		}
		if diff := cmp.Diff(c.want, edges(c.b, c.a), cmp.AllowUnexported(run{})); diff != "" {
			t.Errorf("the other way round: %s", diff)
		}
	}
}

// TestPart has every way in which a mapping of a kernel can be its zygote's, or not.
func TestPart(t *testing.T) {
	kernel := mapped(t, `10000-11000 rw-p 0 00:00 0
20000-21000 r-xp 1000 01:02 3 /bin/a b
30000-31000 rw-p 1000 01:02 3 /bin/a b
40000-41000 r-xp 2000 01:02 3 /bin/a b
50000-53000 r--p 5000 01:09 4 /home/user/own
60000-61000 rw-s 0 01:09 5 /home/user/shared
62000-63000 r--s 0 01:09 5 /home/user/shared
70000-72000 rw-s 0 00:01 6 /dev/zero (deleted)
80000-81000 r--p 0 01:09 7 /home/user/gone (deleted)
90000-91000 r--s 0 01:02 8 /usr/lib/cache
a0000-a1000 rw-s 0 01:02 9 /usr/lib/written
b0000-b1000 rw-s 0 00:01 10 /dev/shm/x
c0000-c3000 r--p 0 01:02 11 /usr/lib/long
ffffffffff600000-ffffffffff601000 --xp 0 00:00 0 [vsyscall]
`)
	zygote := mapped(t, `20000-21000 r-xp 1000 01:02 3 /bin/a b
30000-31000 r--p 1000 01:02 3 /bin/a b
40000-41000 r-xp 1000 01:02 3 /bin/a b
90000-91000 r--s 0 01:02 8 /usr/lib/cache
a0000-a1000 rw-s 0 01:02 9 /usr/lib/written
c1000-c2000 r--p 1000 01:02 11 /usr/lib/long
`)
	written := func(r run) ([]run, error) {
		if r.from == 0x50000 {
			return []run{{0x51000, 0x52000}}, nil
		}
		return nil, nil
	}
	p, err := part(kernel, zygote, whole(written))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, op := range p.ops {
		path, _, _ := strings.Cut(string(p.paths[op.Path:]), "\x00")
		if op.Kind != opOpen && op.Kind != opOpenShared {
			path = ""
		}
		got = append(got, fmt.Sprintf("%d %x+%x prot %d off %x keep %d %s", op.Kind, op.Addr, op.Len, op.Prot, op.Off, op.Keep, path))
	}
	want := []string{
		fmt.Sprintf("%d 40000+1000 prot 5 off 2000 keep 0 /bin/a b", opOpen),             // another part of the same file
		fmt.Sprintf("%d 50000+3000 prot 1 off 5000 keep 1 /home/user/own", opOpen),       // of the sandbox, and written in the middle
		fmt.Sprintf("%d 51000+1000 prot 0 off 0 keep 0 ", opKeep),                        //
		fmt.Sprintf("%d 60000+1000 prot 3 off 0 keep 0 /home/user/shared", opOpenShared), //
		fmt.Sprintf("%d 62000+1000 prot 1 off 0 keep 0 /home/user/shared", opOpenShared), //
		fmt.Sprintf("%d 70000+2000 prot 3 off 2000 keep 0 ", opShare),                    // shared memory without a file
		fmt.Sprintf("%d 80000+1000 prot 1 off 1000 keep 0 ", opOwn),                      // a file that is gone
		fmt.Sprintf("%d a0000+1000 prot 3 off 0 keep 0 /usr/lib/written", opOpenShared),  // the zygote's, but whoever has it can write to it
		fmt.Sprintf("%d b0000+1000 prot 3 off 1000 keep 0 ", opShare),                    // a name that means something else elsewhere
		fmt.Sprintf("%d c0000+1000 prot 1 off 0 keep 0 /usr/lib/long", opOpen),           // longer than the zygote's, at both ends
		fmt.Sprintf("%d c2000+1000 prot 1 off 2000 keep 0 /usr/lib/long", opOpen),        //
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if p.copies != 0x4000 {
		t.Errorf("%x bytes are copied", p.copies)
	}
}

func mapped(t *testing.T, text string) []mapping {
	t.Helper()
	all, err := parseMaps(strings.NewReader(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestPartHasBounds(t *testing.T) {
	var many []mapping
	for i := range uint64(maxOps + 1) {
		many = append(many, mapping{from: 2 * i * page, to: (2*i + 1) * page, file: "01:02:3", path: "/x"})
	}
	none := func(run) ([]run, error) { return nil, nil }
	if _, err := part(many, nil, whole(none)); !fault.Is(err, fault.Exhausted) {
		t.Errorf("many files: %v", err)
	}
	for i := range many {
		many[i].path = "/" + strings.Repeat("x", 4000)
	}
	if _, err := part(many[:300], nil, whole(none)); !fault.Is(err, fault.Exhausted) {
		t.Errorf("long names: %v", err)
	}
	odd := func(r run) ([]run, error) { // every second page
		var out []run
		for at := r.from; at < r.to; at += 2 * page {
			out = append(out, run{at, at + page})
		}
		return out, nil
	}
	if _, err := part([]mapping{{from: 0, to: 3 * maxOps * page, file: "01:02:3", path: "/x"}}, nil, whole(odd)); !fault.Is(err, fault.Exhausted) {
		t.Errorf("many pages: %v", err)
	}
	failed := errors.New("no")
	if _, err := part(many[:1], nil, whole(func(run) ([]run, error) { return nil, failed })); !errors.Is(err, failed) {
		t.Errorf("got %v", err)
	}
}

// TestKnownLinesAreNotRead has a zygote's lines be skipped in its children, but none of what a branch must part with.
func TestKnownLinesAreNotRead(t *testing.T) {
	z, err := readZygote(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range z.all {
		m := m
		if m.shared && m.prot&unix.PROT_WRITE != 0 && m.remains(&m) {
			t.Errorf("a branch would share %+v", m)
		}
	}
	const file, common, own = "10000-11000 r-xp 0 01:02 3 /bin/a", "20000-21000 rw-s 0 00:01 4 /dev/zero (deleted)", "30000-31000 rw-p 0 00:00 0"
	got, err := parseMaps(strings.NewReader(file+"\n"+common+"\n"+own+"\n"), map[string]bool{file: true, common + " ": true, own[1:]: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].from != 0x20000 || got[1].from != 0x30000 {
		t.Errorf("%+v", got)
	}
	for line, want := range map[string]bool{file: true, common: false, "10000-11000 rw-s 0 01:02 3 /bin/a": false, "10000-11000 r--s 0 01:02 3 /bin/a": true, "10000-11000 r--s 0 00:01 3 /memfd:x": false} {
		m, err := parseMapping(line)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.remains(&m); got != want {
			t.Errorf("%s remains: %t", line, got)
		}
	}
}

func TestAddRun(t *testing.T) {
	var grown []run
	for _, p := range []uint64{1, 2, 3, 7, 8, 20} {
		grown = addRun(grown, p*page, (p+1)*page)
	}
	if diff := cmp.Diff([]run{{page, 4 * page}, {7 * page, 9 * page}, {20 * page, 21 * page}}, grown, cmp.AllowUnexported(run{})); diff != "" {
		t.Error(diff)
	}
}

// TestWritten maps a file, writes to some of its pages and reads others: both ways to ask the host say the same.
func TestWritten(t *testing.T) {
	const pages = 300 // more than one answer has room for
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(pages * page); err != nil {
		t.Fatal(err)
	}
	memory, err := unix.Mmap(int(file.Fd()), 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(memory)
	from := uint64(uintptr(unsafe.Pointer(&memory[0])))
	var want []run
	sum := byte(0)
	for i := range pages {
		switch {
		case i%3 == 0 || i > 290:
			memory[i*page] = 1
			want = addRun(want, from+uint64(i)*page, from+uint64(i+1)*page)
		case i%3 == 1:
			sum += memory[i*page]
		}
	}
	if sum != 0 {
		t.Fatal("the file is not empty")
	}
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer pagemap.Close()
	whole := run{from, from + pages*page}
	scanned, err := writtenBy(pagemap)(whole)
	if err != nil {
		t.Fatal(err)
	}
	read, err := readWritten(pagemap, whole)
	if err != nil {
		t.Fatal(err)
	}
	for way, got := range map[string][]run{"scanned": scanned, "read": read} {
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(run{})); diff != "" {
			t.Errorf("%s: %s", way, diff)
		}
	}
	// A part of it, which begins and ends in the middle.
	some := run{from + 3*page, from + 7*page}
	for way, find := range map[string]func(run) ([]run, error){"scanned": writtenBy(pagemap), "read": func(r run) ([]run, error) { return readWritten(pagemap, r) }} {
		got, err := find(some)
		if diff := cmp.Diff([]run{{from + 3*page, from + 4*page}, {from + 6*page, from + 7*page}}, got, cmp.AllowUnexported(run{})); err != nil || diff != "" {
			t.Errorf("%s: %v %s", way, err, diff)
		}
	}
}

func TestOwnBytes(t *testing.T) {
	const size = 64 << 20
	before, err := ownBytes(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	memory, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(memory)
	after, err := ownBytes(os.Getpid())
	if err != nil || after < before+size*9/10 || after > before+size*11/10 {
		t.Errorf("%d before, %d after %v", before, after, err)
	}
}

func TestOfWhatHasEnded(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if all, err := readMaps(pid, nil); err != nil || len(all) == 0 {
		t.Errorf("%v %v", all, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := readMaps(pid, nil); !fault.Is(err, fault.Unavailable) {
		t.Errorf("mappings: %v", err)
	}
	if _, err := ownBytes(pid); !fault.Is(err, fault.Unavailable) {
		t.Errorf("bytes: %v", err)
	}
}

// whole is a look at files that are as long as their mappings.
func whole(written func(run) ([]run, error)) look {
	return look{written, func(m mapping) uint64 { return m.to }}
}

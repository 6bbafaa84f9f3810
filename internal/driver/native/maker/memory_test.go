package maker // inside: nothing of this has a name outside

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

func TestListsAreLaidOutAsTheKernelReadsThem(t *testing.T) {
	branch, err := filepath.Abs("../../../../kernel/native/branch.c")
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(t.TempDir(), "size.c")
	// A negative array size does not compile: the compiler itself compares.
	text := fmt.Sprintf("#include %q\n", branch)
	for what, want := range map[string]int{
		"sizeof(struct op)": opSize, "sizeof(struct list)": headSize, "BRANCH_MAGIC": branchMagic, "MAX_FILES": maxOpens,
		"UNMAP": opUnmap, "ANON": opAnon, "OPEN": opOpen, "PROTECT": opProtect, "DROP": opDrop, "COPY": opCopy, "LONG": opLong, "ALLOW": opAllow,
		"SHARED": flagShared, "WRITABLE": flagWritable,
		"__builtin_offsetof(struct op, addr)": int(unsafe.Offsetof(memoryOp{}.Addr)), "__builtin_offsetof(struct op, off)": int(unsafe.Offsetof(memoryOp{}.Off)),
		"__builtin_offsetof(struct op, b)": int(unsafe.Offsetof(memoryOp{}.B)), "__builtin_offsetof(struct op, prot)": int(unsafe.Offsetof(memoryOp{}.Prot)),
		"__builtin_offsetof(struct list, room)": int(unsafe.Offsetof(listHead{}.Room)), "__builtin_offsetof(struct list, brk)": int(unsafe.Offsetof(listHead{}.Brk)),
	} {
		text += fmt.Sprintf("_Static_assert(%s == %d, \"%s\");\n", what, want, what)
	}
	// Beside the lists a newborn needs its stack and what it knows of the files.
	text += fmt.Sprintf("_Static_assert(STACK + sizeof(struct become) <= %d, \"room\");\n", roomForStack)
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-fsyntax-only", "-w", source).CombinedOutput(); err != nil {
		t.Errorf("branch.c and memory.go differ: %v\n%s", err, out)
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
7f0000005000-7f0000006000 rw-p 7f0000005000 00:c0 2                      /.cove-branch
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
7ffc00030000-7ffc00034000 r--p 00000000 00:00 0                          [vvar]
7ffc00034000-7ffc00036000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
`
	got, err := parseMaps(strings.NewReader(text))
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
		{from: 0x7f0000005000, to: 0x7f0000006000, prot: rw, off: 0x7f0000005000, file: "00:c0:2", path: "/.cove-branch"},
		{from: 0x7ffc00000000, to: 0x7ffc00021000, prot: rw, path: "[stack]"},
		{from: 0x7ffc00030000, to: 0x7ffc00034000, prot: unix.PROT_READ, path: "[vvar]"},
		{from: 0x7ffc00034000, to: 0x7ffc00036000, prot: unix.PROT_READ | unix.PROT_EXEC, path: "[vdso]"},
		{from: 0xffffffffff600000, to: 0xffffffffff601000, prot: unix.PROT_EXEC, path: "[vsyscall]"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mapping{})); diff != "" {
		t.Error(diff)
	}
	type kinds struct{ special, reopens, plain bool }
	var is []kinds
	for _, m := range got {
		is = append(is, kinds{m.special(), m.reopens(), m.plain()})
	}
	if diff := cmp.Diff([]kinds{
		{reopens: true}, {plain: true}, {}, {reopens: true}, {}, {}, {plain: true}, {}, {special: true}, {special: true}, {special: true},
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
		{"/.cove-branch", false}, {"/.cove-branch2", false}, {"/home/user/.cove-branch", true}, {"/dev/shm/x", false}, {"/memfd:x (deleted)", false}, {"/memfd:x", false},
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
		if c.path != "/.cove-branch" && c.path != "/.cove-branch2" && m.plain() {
			t.Errorf("%q passes for memory of no file", c.path)
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
		if m, err := parseMaps(strings.NewReader(text)); err == nil {
			t.Errorf("%.40q is read as %+v", text, m)
		}
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add("00400000-00401000 r-xp 00001000 fe:01 1234      /usr/bin/python3\n7f0000000000-7f0000001000 rw-p 0 00:00 0\n")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := parseMaps(strings.NewReader(text))
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
	})
}

func TestReadLayout(t *testing.T) {
	proc, err := os.Open("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	memory, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(memory)
	memory[page] = 1
	l, err := readLayout(proc)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	here := uint64(uintptr(unsafe.Pointer(&memory[page])))
	i := 0
	if m := at(l.maps, &i, here); m == nil || m.prot&unix.PROT_WRITE == 0 {
		t.Errorf("our own memory is %+v", m)
	}
	pages, err := l.pages(here, here+page)
	if err != nil || len(pages) != 1 || pages[0]&pagePresent == 0 {
		t.Errorf("%x %v", pages, err)
	}
	if where := l.populated(run{here, here + page}); len(where) != 1 || where[0] != (run{here, here + page}) {
		t.Errorf("%+v", where)
	}

	// One that has ended.
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	gone, err := os.Open(fmt.Sprintf("/proc/%d", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer gone.Close()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := readLayout(gone); !fault.Is(err, fault.Unavailable) {
		t.Errorf("got %v", err)
	}
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

func TestSplit(t *testing.T) {
	const h = hugePage
	for _, c := range []struct {
		claim       string
		in          run
		short, long []run
	}{
		{"too short", run{0, longRun - page}, []run{{0, longRun - page}}, nil},
		{"aligned", run{4 * h, 8 * h}, nil, []run{{4 * h, 8 * h}}},
		{"small pieces at both ends", run{4*h - page, 8*h + page}, []run{{4*h - page, 4 * h}, {8 * h, 8*h + page}}, []run{{4 * h, 8 * h}}},
		{"large pieces at both ends", run{4*h - h/2, 8*h + h/2}, nil, []run{{4*h - h/2, 8*h + h/2}}},
		{"one of each", run{4*h - h/2, 8*h + page}, []run{{8 * h, 8*h + page}}, []run{{4*h - h/2, 8 * h}}},
	} {
		short, long := split([]run{c.in})
		if diff := cmp.Diff([][]run{c.short, c.long}, [][]run{short, long}, cmp.AllowUnexported(run{})); diff != "" {
			t.Errorf("%s: %s", c.claim, diff)
		}
	}
}

// TestRunsOfPages compares with sets of pages.
func TestRunsOfPages(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const space = 60
	draw := func() (runs []run, set [space]bool) {
		for at := random.IntN(5); at < space-6; {
			n := 1 + random.IntN(5)
			runs = append(runs, run{uint64(at) * page, uint64(at+n) * page})
			for i := range n {
				set[at+i] = true
			}
			at += n + 1 + random.IntN(6)
		}
		return runs, set
	}
	check := func(claim string, runs []run, want [space]bool) {
		t.Helper()
		var got [space]bool
		last := uint64(0)
		for i, r := range runs {
			if r.from >= r.to || i > 0 && r.from < last {
				t.Fatalf("%s: %v", claim, runs)
			}
			last = r.to
			for p := r.from / page; p < r.to/page; p++ {
				got[p] = true
			}
		}
		if got != want {
			t.Fatalf("%s: %v gives %v, want %v", claim, runs, got, want)
		}
	}
	for range 5000 {
		a, inA := draw()
		b, inB := draw()
		var both, without [space]bool
		pages := 0
		for i := range space {
			both[i], without[i] = inA[i] || inB[i], inA[i] && !inB[i]
			if inA[i] {
				pages++
			}
		}
		before := slices.Clone(a)
		check("union", union(a, b), both)
		check("subtract", subtract(a, b), without)
		if !slices.Equal(a, before) {
			t.Fatal("what was given was changed")
		}
		if got := runsBytes(a); got != uint64(pages)*page {
			t.Fatalf("%d bytes in %v", got, a)
		}
	}
	check("of nothing", union(nil, nil), [space]bool{})
	check("from nothing", subtract(nil, []run{{0, page}}), [space]bool{})
	var grown []run
	for _, p := range []uint64{1, 2, 3, 7, 8, 20} {
		grown = addRun(grown, p*page, (p+1)*page)
	}
	if diff := cmp.Diff([]run{{page, 4 * page}, {7 * page, 9 * page}, {20 * page, 21 * page}}, grown, cmp.AllowUnexported(run{})); diff != "" {
		t.Error(diff)
	}
}

func TestVerdict(t *testing.T) {
	const (
		none      = 0
		anon      = pagePresent | 0x1000
		other     = pagePresent | 0x2000
		exclusive = pagePresent | 1<<56 | 0x1000
		file      = pagePresent | pageOfFile | 0x3000
		file2     = pagePresent | pageOfFile | 0x4000
		swapped   = pageSwapped | 0x55
		swapped2  = pageSwapped | 0x66
		hidden    = uint64(pagePresent) // whoever may not see frames sees none
	)
	for _, c := range []struct {
		theirs, ours uint64
		want         pageVerdict
	}{
		{none, none, pageSame}, {anon, anon, pageSame}, {anon, exclusive, pageSame}, {exclusive, anon, pageSame}, {file, file, pageSame}, {file, none, pageSame}, {none, file, pageSame}, {swapped, swapped, pageSame},
		{anon, none, pageCopy}, {anon, other, pageCopy}, {anon, file, pageCopy}, {swapped, none, pageCopy}, {swapped, anon, pageCopy}, {anon, swapped, pageCopy}, {swapped, swapped2, pageCopy}, {hidden, hidden, pageCopy},
		{none, anon, pageDrop}, {file, anon, pageDrop}, {none, swapped, pageDrop}, {file, swapped, pageDrop},
		{file, file2, pageSame}, // both read it from the file
	} {
		if got := verdict(c.theirs, c.ours); got != c.want {
			t.Errorf("%x and %x: %d, want %d", c.theirs, c.ours, got, c.want)
		}
	}
}

func TestRoom(t *testing.T) {
	first, err := room(10<<20, &layout{})
	if err != nil {
		t.Fatal(err)
	}
	taken := &layout{maps: []mapping{{from: first + 5<<20, to: first + 5<<20 + page}}}
	second, err := room(10<<20, &layout{}, taken)
	if err != nil || second == first || second%hugePage != 0 {
		t.Errorf("%x %v", second, err)
	}
	if got, err := room(page, taken); err != nil || got != first {
		t.Errorf("what is small enough fits below: %x %v", got, err)
	}
	if _, err := room(page, &layout{maps: []mapping{{from: page, to: 1 << 47}}}); !fault.Is(err, fault.Exhausted) {
		t.Errorf("got %v", err)
	}
}

func TestListFile(t *testing.T) {
	ops := []memoryOp{{Kind: opOpen, Prot: 1, Addr: 0x1000, Len: 0x2000, Off: 3, A: 4, B: 5}, {Kind: opUnmap, Addr: 0x9000, Len: page}}
	f, err := listFile(listHead{Room: 7, RoomLen: 8}, ops, []byte("/a\x00/b\x00"), 100<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() != listSize(2, 6)+100<<20 || listSize(2, 6)%page != 0 {
		t.Errorf("%+v %v", st, err)
	}
	raw := make([]byte, headSize+2*opSize+6)
	if _, err := f.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	head, first := (*listHead)(unsafe.Pointer(&raw[0])), (*memoryOp)(unsafe.Pointer(&raw[headSize]))
	if *head != (listHead{Magic: branchMagic, Count: 2, Room: 7, RoomLen: 8}) || *first != ops[0] || string(raw[headSize+2*opSize:]) != "/a\x00/b\x00" {
		t.Errorf("%+v %+v %q", head, first, raw[headSize+2*opSize:])
	}
	if err := sealList(f); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("a list that is sealed can be written")
	}
}

// TestCompare has every way in which the mappings of a kernel and a newborn can differ.
func TestCompare(t *testing.T) {
	kernel, newborn := fakeProcess(t, "kernel"), fakeProcess(t, "newborn")
	m, err := compare(kernel, newborn)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, op := range m.ops {
		got = append(got, fmt.Sprintf("%d %x+%x prot %d off %x flags %d", op.Kind, op.Addr, op.Len, op.Prot, op.Off, op.B))
	}
	want := []string{
		fmt.Sprintf("%d 10000+1000 prot 3 off 0 flags 0", opAnon),    // only the kernel has it
		fmt.Sprintf("%d 20000+2000 prot 0 off 0 flags 0", opUnmap),   // only the newborn has it
		fmt.Sprintf("%d 30000+1000 prot 1 off 0 flags 0", opProtect), // both, with other rights
		fmt.Sprintf("%d 40000+1000 prot 1 off 5000 flags 0", opOpen), // a file that only the kernel maps
		fmt.Sprintf("%d 50000+1000 prot 3 off 0 flags 3", opOpen),    // a file that it shares and writes
		fmt.Sprintf("%d 60000+1000 prot 3 off 0 flags 1", opAnon),    // shared memory without a file
		fmt.Sprintf("%d 70000+1000 prot 3 off 0 flags 0", opAnon),    // a file that is gone
		fmt.Sprintf("%d 70000+1000 prot 1 off 0 flags 0", opProtect), // which it only reads
		fmt.Sprintf("%d 80000+1000 prot 1 off 1000 flags 0", opOpen), // the same file elsewhere
		fmt.Sprintf("%d 91000+1000 prot 0 off 0 flags 0", opUnmap),   // longer in the newborn
		fmt.Sprintf("%d a1000+1000 prot 3 off 0 flags 0", opAnon),    // longer in the kernel
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]run{{0x60000, 0x61000}, {0x70000, 0x71000}}, m.copy, cmp.AllowUnexported(run{})); diff != "" {
		t.Error(diff)
	}
	if got, want := string(m.paths), "/bin/a b\x00/home/shared\x00/bin/c\x00"; got != want {
		t.Errorf("paths %q, want %q", got, want)
	}
}

// fakeProcess has mappings as written here and no pages in them: the page map is our own, and we have nothing that low.
func fakeProcess(t *testing.T, who string) *layout {
	t.Helper()
	text := map[string]string{
		"kernel": `10000-11000 rw-p 0 00:00 0
30000-31000 r--p 0 00:00 0
40000-41000 r--p 5000 01:02 3 /bin/a b
50000-51000 rw-s 0 01:02 4 /home/shared
60000-61000 rw-s 0 00:01 5 /dev/zero (deleted)
70000-71000 r--p 0 01:02 6 /home/gone (deleted)
80000-81000 r--p 1000 01:02 7 /bin/c
90000-91000 rw-p 0 00:00 0
a0000-a2000 rw-p 0 00:00 0
ffffffffff600000-ffffffffff601000 --xp 0 00:00 0 [vsyscall]
`,
		"newborn": `20000-22000 rw-p 0 00:00 0
30000-31000 rw-p 0 00:00 0
80000-81000 r--p 0 01:02 7 /bin/c
90000-92000 rw-p 0 00:00 0
a0000-a1000 rw-p 0 00:00 0
ffffffffff600000-ffffffffff601000 --xp 0 00:00 0 [vsyscall]
`,
	}[who]
	maps, err := parseMaps(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pagemap.Close() })
	return &layout{maps: maps, pagemap: pagemap}
}

package maker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/driver/native/trace"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// PlanSize is the size of a plan on the wire.
func PlanSize() int { return len(new(plan).bytes()) }

// OOMLog is the memory of the kernel's out-of-memory messages, without the kernel.
type OOMLog struct{ o *oomLog }

// Kills counts the processes that were killed for lack of memory, by group.
type Kills map[string]int

func (k Kills) names() []string        { return slices.Sorted(maps.Keys(k)) }
func (k Kills) kills(group string) int { return k[group] }

// NewOOMLog follows groups below a prefix.
func NewOOMLog(prefix string, kills Kills, tell func(group, text string)) OOMLog {
	return OOMLog{newOOMLog(prefix, kills, func(group string, v victim) { tell(group, v.String()) })}
}

// Lost says that records were overwritten.
func (l OOMLog) Lost() { l.o.recount() }

// ServeNothing has a maker that has no sandbox answer on a socket until it is told to end. What it returns keeps what the
// maker keeps.
func ServeNothing(l *net.UnixListener) (keep any, err error) {
	m := &Maker{cfg: Config{ServerUID: os.Getuid()}, log: slog.New(slog.DiscardHandler)}
	return m, m.Serve(context.Background(), l)
}

// HoldAnchor has a zygote that is this process stop one of its children.
func HoldAnchor(pidfd *os.File) error {
	z := &zygote{pid: os.Getpid(), owner: os.Getuid(), tracer: trace.New()}
	a, err := z.holdAnchor(pidfd)
	if err == nil {
		a.Kill()
	}
	return err
}

// ServeFew answers so many connections at a time until ctx ends, with a maker that has no sandbox.
func ServeFew(ctx context.Context, l *net.UnixListener, connections int) error {
	cfg := Config{ServerUID: os.Getuid(), Connections: connections}
	return (&Maker{cfg: cfg, log: slog.New(slog.DiscardHandler)}).Serve(ctx, l)
}

// UID is that of a sandbox's user on the host.
func UID(slot, user int) int { return uidBase(slot) + user }

// Hear takes one record of the kernel's log.
func (l OOMLog) Hear(record string) { l.o.hear(record) }

// Victim of a group.
func (l OOMLog) Victim(group string) (text string, init, ok bool) {
	v, ok := l.o.victim(group)
	return v.String(), v.init, ok
}

// Await is Victim for a group that has counted a kill.
func (l OOMLog) Await(group string) (text string, init, ok bool) {
	v, ok := l.o.awaitVictim(group, endNameDelay)
	return v.String(), v.init, ok
}

// Journal of ends.
type Journal struct{ j *journal }

// NewJournal is empty.
func NewJournal() Journal { return Journal{newJournal()} }

// Add an end.
func (j Journal) Add(id string) { j.j.add(sandbox.Ended{ID: id}) }

// Forget ends.
func (j Journal) Forget(ids ...string) { j.j.forget(ids) }

// From gives the ids at and after a position, and the next position.
func (j Journal) From(position int) ([]string, int) {
	ends, next, _ := j.j.from(position)
	var ids []string
	for _, e := range ends {
		ids = append(ids, e.ID)
	}
	return ids, next
}

// Unescape undoes the escapes of mountinfo.
var Unescape = unescape

// MaxPools is how many pools are kept.
const MaxPools = maxPools

// PutAway tells which of n pools, numbered from the one unused for longest, would be put away when one of them is in use.
func PutAway(n, inUse int) []string {
	m := &Maker{pools: map[poolKey]*pool{}, sandboxes: map[string]*live{}}
	begin := time.Now().Add(-time.Hour)
	for i := range n {
		p := &pool{key: poolKey{tenant: strconv.Itoa(i)}, started: true, taken: begin.Add(time.Duration(i) * time.Second)}
		m.pools[p.key] = p
		if i == inUse {
			m.sandboxes["living"] = &live{pool: p}
		}
	}
	var gone []string
	for p := m.leastUsed(m.surplus); p != nil; p = m.leastUsed(m.surplus) {
		gone = append(gone, p.key.tenant)
	}
	return gone
}

// Disks makes disks without sandboxes.
type Disks struct{ d *disks }

// OpenDisks in a directory.
func OpenDisks(dir string, reflink bool) (Disks, error) {
	d, err := openDisks(dir)
	if d != nil && !reflink {
		d.reflink = false
	}
	return Disks{d}, err
}

// Close lets go of the empty ones.
func (d Disks) Close() {
	d.d.close()
}

// Disk is one that is mounted somewhere.
type Disk struct {
	k  *disk
	At string // its directory
}

// Frozen is a disk as it was.
type Frozen struct{ f *frozenDisk }

// Make a disk, of a frozen one's files or empty.
func (d Disks) Make(size int64, storage sandbox.Storage, from Frozen) (Disk, error) {
	k, mount, err := d.d.make(form{storage: storage, disk: size, from: from.f}, maxTrees)
	if err != nil {
		return Disk{}, err
	}
	mount.Close()
	return Disk{k, fmt.Sprintf("/proc/self/fd/%d", k.root.Fd())}, nil
}

// Freeze it.
func (d Disk) Freeze() (Frozen, error) {
	f, err := d.k.freeze(d.k.disks.dir, d.k.still)
	return Frozen{f}, err
}

// Below counts the frozen layers under it.
func (d Disk) Below() int { return len(d.k.below) }

// Work is the work directory in use, of each tree.
func (d Disk) Work() string { return workDirs[d.k.work] }

// Bytes on it.
func (d Disk) Bytes() int64 { return d.k.bytes() }

// Close it.
func (d Disk) Close() { d.k.close() }

// Show mounts it read-only; the function closes the mount.
func (f Frozen) Show() (at string, done func(), err error) {
	mount, err := f.f.show()
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", mount.Fd()), func() { mount.Close() }, nil
}

// Close it.
func (f Frozen) Close() { f.f.close() }

// Image is its file.
func (f Frozen) Image() *os.File { return f.f.image }

// SmallLayer is up to what size a copy is made.
const SmallLayer = smallLayer

// RemoveTree removes a directory with everything in it.
var RemoveTree = removeTree

// CommandIDs are who commands of a template run as.
func CommandIDs(t *template.Template) (uid, gid int, ok bool) {
	who, ok := commandAccount(t)
	return who.uid, who.gid, ok
}

// Volumes of tenants, without sandboxes.
type Volumes struct{ v *volumes }

// OpenVolumes in a directory.
func OpenVolumes(dir string) (Volumes, error) {
	v, err := openVolumes(dir, "test")
	return Volumes{v}, err
}

// Path of a volume's file.
func (v Volumes) Path(tenant, name string) (string, error) { return v.v.path(tenant, name) }

// Use opens one, after the function says that it is this one's turn.
func (v Volumes) Use(ctx context.Context, path string, turn func()) error {
	u, done, err := v.v.hold(ctx, path)
	if err != nil {
		return err
	}
	defer done()
	turn()
	return u.use(ctx)
}

// Describe one.
func (v Volumes) Describe(tenant, name string) (sandbox.Volume, error) {
	return v.v.describe(tenant, name)
}

// Zygote is what a pool knows of one: its age and its children.
type Zygote struct {
	Age           time.Duration
	Forks, Living int
}

// Choose is which of them a pool takes, which it keeps, and whether it sees room to spare.
func Choose(all ...Zygote) (best int, kept []int, spare bool) {
	p, numbers := &pool{}, map[*zygote]int{}
	for i, z := range all {
		it := &zygote{born: time.Now().Add(-z.Age), forks: z.Forks, reserved: z.Living}
		p.zygotes, numbers[it] = append(p.zygotes, it), i
	}
	z, spare := p.usable()
	best = -1
	if z != nil {
		best = numbers[z]
	}
	for _, z := range p.zygotes {
		kept = append(kept, numbers[z])
	}
	return best, kept, spare
}

// Hurry is for the process of a maker: its zygotes are old after so many forks, it looks at layers so often, and has that clock.
func Hurry(forks int, verify time.Duration, now func() time.Time) {
	zygoteForks, verifyEvery, clock = forks, verify, now
}

// ShortOrder is an order to fork as the shim reads it.
func ShortOrder(uid, gid int, groups []int, token, cwd string, ahead bool) ([]byte, error) {
	return zygoteRequest{Op: "fork", UID: uid, GID: gid, Groups: groups, Token: token, Cwd: cwd, Ahead: ahead}.short()
}

// ErrZygoteDied is what whoever asked a zygote hears that ended.
var ErrZygoteDied = errZygoteDied

// OrderFork orders a fork from a process that plays a zygote, with descriptors to give.
func OrderFork(ctx context.Context, conn *net.UnixConn, pidfd *os.File, files ...*os.File) error {
	z := &zygote{conn: conn, pidfd: pidfd, waiting: map[string]chan zygoteAnswer{}, living: map[string]func(exit){}}
	_, err := z.fork(ctx, zygoteRequest{Op: "fork", Token: "t"}, nil, files...)
	if living, _, _ := z.load(); living > 0 || len(z.waiting) > 0 {
		return errors.Join(err, errors.New("the order is still waited for"))
	}
	return err
}

// DefaultReserve is what stays free of a file system where the operator says nothing.
var DefaultReserve = defaultReserve

// LoopError finds records of errors of loop devices.
var LoopError = loopError

// AwaitHang and IsStopped are how a fork notices that its zygote hangs.
var (
	AwaitHang = awaitHang
	IsStopped = isStopped
)

// DiskSpace is the account of the file system of a directory.
type DiskSpace struct{ d *diskSpace }

// OpenSpace opens it with a reserve that depends on what is free.
func OpenSpace(dir string, reserve func(free int64) int64) (s DiskSpace, free int64, err error) {
	d, err := openSpace(dir)
	if err != nil {
		return s, 0, err
	}
	now, err := d.now()
	d.reserve = reserve(now.free)
	return DiskSpace{d}, now.free, err
}

// Close lets go of the directory.
func (s DiskSpace) Close() error { return s.d.dir.Close() }

// Check refuses a start that writes so many bytes.
func (s DiskSpace) Check(bytes int64) error { return s.d.check(bytes) }

// Grant keeps space for a copy.
func (s DiskSpace) Grant(dir string, bytes int64) (release func(), err error) {
	return s.d.grantDir(dir, bytes)
}

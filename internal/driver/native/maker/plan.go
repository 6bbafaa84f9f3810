package maker

import (
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/net/bpf"

	"github.com/covehq/cove/internal/driver/native/seccomp"
)

// Bounds of a plan, the same as in shell/shell.c.
const (
	maxLayers = 200 // with what else a shell is given, fewer than the 253 descriptors that one message carries
	maxImages = 40  // of these, file systems of their own behind loop devices
	maxTrees  = 8
	maxTarget = 247
	maxFilter = 1024
	maxMounts = 16
)

const (
	modeSandbox = 1
	modeZygote  = 2
	modeReroot  = 3

	storageGiven = 0
	storageTmpfs = 1
)

type planTree struct {
	First, Count uint32
	Target       [248]byte
}

// plan mirrors struct plan of shell/shell.c, little-endian.
type plan struct {
	Mode, Storage, Volatile, NoFile uint32
	Layers, Trees, Cgroups, Filter  uint32
	UID, GID, Argc, Images          uint32
	Work, Mounts                    uint32
	Bound, Heir, TmpfsBytes         uint64
	Base                            [256]byte
	Hostname                        [64]byte
	Tree                            [maxTrees]planTree
	Argv                            [1024]byte
	Program                         [maxFilter]uint64
	Mount                           [maxMounts][maxTarget + 1]byte
}

type report struct {
	Step [60]byte
	Err  uint32
}

func (p *plan) setArgv(argv ...string) error {
	joined := strings.Join(argv, "\x00") + "\x00"
	if len(joined) > len(p.Argv) {
		return fmt.Errorf("arguments are too long")
	}
	p.Argc = uint32(len(argv))
	copy(p.Argv[:], joined)
	return nil
}

func (p *plan) setFilter(program []uint64) {
	p.Filter = uint32(len(program))
	copy(p.Program[:], program)
}

// The filters, as a plan has them, assembled once and not for every shell.
var (
	sandboxFilter = sync.OnceValue(func() []uint64 { return words(seccomp.Sandbox()) })
	zygoteFilter  = sync.OnceValue(func() []uint64 { return words(seccomp.Zygote()) })
)

func words(program []bpf.RawInstruction) []uint64 {
	if len(program) > maxFilter {
		panic(fmt.Sprintf("a filter of %d instructions does not fit into a plan", len(program)))
	}
	b := seccomp.Bytes(program)
	w := make([]uint64, len(program))
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return w
}

// bytes are those of the struct itself: its reader is a program of this machine, and to encode its thousands of elements one
// by one took 0.1 ms for every shell.
func (p *plan) bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// Capabilities, by number.
const (
	capChown = iota
	capDacOverride
	capDacReadSearch
	capFowner
	capFsetid
	capKill
	capSetgid
	capSetuid
	capSetpcap
	_
	capNetBindService
	_
	capNetAdmin
	_
	_
	_
	_
	_
	capSysChroot
	capSysPtrace
	_
	capSysAdmin
	_
	_
	capSysResource
	_
	_
	capMknod
	_
	capAuditWrite
	_
	capSetfcap
	_
	_
	capSyslog
)

// makerBound is what the maker itself keeps: to make namespaces, mounts and id maps (SYS_ADMIN, SETUID, SETGID,
// SYS_PTRACE for descriptors of namespaces and to hold anchors, SETPCAP to drop what its children shall not have), networks (NET_ADMIN, and
// NET_BIND_SERVICE for the resolver's port), files and devices of the base (CHOWN, DAC_OVERRIDE, FOWNER, MKNOD), the
// kernel's log (SYSLOG), and to end processes (KILL).
const makerBound = 1<<capSysAdmin | 1<<capSetuid | 1<<capSetgid | 1<<capSysPtrace | 1<<capSetpcap | 1<<capNetAdmin |
	1<<capNetBindService | 1<<capChown | 1<<capDacOverride | 1<<capFowner | 1<<capMknod | 1<<capSyslog | 1<<capKill | 1<<capSysChroot

// agentBound is what the agent and whatever it starts may hold: what sudo's root gets.
const agentBound = 1<<capChown | 1<<capDacOverride | 1<<capFowner | 1<<capFsetid | 1<<capSetuid | 1<<capSetgid |
	1<<capSetfcap | 1<<capKill | 1<<capNetBindService | 1<<capSysChroot | 1<<capAuditWrite

// agentHeir is what the agent alone holds beside it, which keeps that root from tracing the agent. It passes one exec, the
// agent's: there it is taken out of what others would inherit.
const agentHeir = 1 << capSysPtrace

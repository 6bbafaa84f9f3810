// Package wire is what the server and the maker say to each other: one JSON message each way on a SEQPACKET socket,
// with descriptors beside it. It knows no sandbox internals; both sides import it and nothing of each other.
package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Version of this protocol: a server refuses a maker that speaks another.
const Version = 3

// Op names a request.
type Op string

// The requests.
const (
	OpHello    Op = "hello"    // → Hello
	OpPrepare  Op = "prepare"  // Tenant, Template, ID (its digest); returns when the zygote is ready and the pool has begun to fill
	OpStart    Op = "start"    // Start → one descriptor: a channel to the agent
	OpChannel  Op = "channel"  // ID → one descriptor: another channel to the agent
	OpKernel   Op = "kernel"   // ID, Kernel: fork one from the zygote into the sandbox
	OpChange   Op = "change"   // ID, Change
	OpUsage    Op = "usage"    // ID → Usage
	OpStop     Op = "stop"     // ID, Cause, Message
	OpFork     Op = "fork"     // Fork, one descriptor: a socket to the kernel → Cut, then Forked and a channel to each child's agent, in their order
	OpPause    Op = "pause"    // ID: stop its processes
	OpResume   Op = "resume"   // ID
	OpSnapshot Op = "snapshot" // Snapshot → Template
	OpRemove   Op = "remove"   // Tenant, Template: remove a template that was made by a snapshot, or of an image
	OpList     Op = "list"     // After → Instances, a page
	OpEnded    Op = "ended"    // a stream: every end that was not forgotten, then those to come
	OpForget   Op = "forget"   // IDs
	OpFloor    Op = "floor"    // Tenant, ID (a digest): a plain fork of that zygote, for measuring → one descriptor
	OpStats    Op = "stats"    // → Stats
	OpShutdown Op = "shutdown" // ends every sandbox and the maker; the connection closes when it is gone

	OpLayers      Op = "layers"       // IDs → Layers: those that are unpacked
	OpUnpack      Op = "unpack"       // Layer, one descriptor: the file to read → Layers, one; a caller who leaves ends it
	OpAddImage    Op = "add_image"    // Image → Template
	OpPruneLayers Op = "prune_layers" // → Freed

	OpVolumes      Op = "volumes"       // Tenant → Volumes
	OpVolumeMake   Op = "volume_make"   // Tenant, Volume → Volumes, one
	OpVolumeRemove Op = "volume_remove" // Tenant, Volume
)

// Request is one message to the maker.
type Request struct {
	Op       Op            `json:"op"`
	ID       string        `json:"id,omitempty"`
	IDs      []string      `json:"ids,omitempty"`
	After    string        `json:"after,omitempty"`
	Kernel   string        `json:"kernel,omitempty"`
	Cause    sandbox.Cause `json:"cause,omitempty"`
	Message  string        `json:"message,omitempty"` // beside Cause
	Tenant   string        `json:"tenant,omitempty"`
	Template string        `json:"template,omitempty"` // a name; what it stands for the maker reads for itself
	Start    *Start        `json:"start,omitempty"`
	Change   *Change       `json:"change,omitempty"`

	Fork     *sandbox.ForkRequest     `json:"fork,omitempty"`
	Snapshot *sandbox.SnapshotRequest `json:"snapshot,omitempty"`
	Layer    *sandbox.LayerRequest    `json:"layer,omitempty"`
	Image    *sandbox.ImageRequest    `json:"image,omitempty"`
	Volume   *sandbox.Volume          `json:"volume,omitempty"` // its name, and its size when it is to be made
}

// Start is sandbox.StartRequest on the wire; the template travels with Prepare and is named by its digest.
type Start struct {
	ID       string            `json:"id"`
	Tenant   string            `json:"tenant"`
	Digest   string            `json:"digest"`
	Limits   template.Limits   `json:"limits"`
	Network  policy.Network    `json:"network"`
	Storage  sandbox.Storage   `json:"storage,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	Deadline time.Time         `json:"deadline,omitzero"`
	NoKernel bool              `json:"no_kernel,omitempty"`
	Mounts   []sandbox.Mount   `json:"mounts,omitempty"`
}

// Change is sandbox.Change on the wire.
type Change struct {
	Deadline *time.Time       `json:"deadline,omitempty"`
	Network  *policy.Network  `json:"network,omitempty"`
	Limits   *template.Limits `json:"limits,omitempty"`
}

// Hello is what a maker says of itself.
type Hello struct {
	Version int    `json:"version"`
	PID     int    `json:"pid"`
	BootID  string `json:"boot_id"`
	Cgroup  int    `json:"cgroup"` // 1 or 2
	Disk    string `json:"disk"`
	Network bool   `json:"network"`
	Freezer bool   `json:"freezer"` // sandboxes can be paused
	// Spoilt are templates of the operator whose layers have changed since they were built: digests
	// by name.
	Spoilt map[string]string `json:"spoilt,omitempty"`
}

// Stats counts what the maker holds; a leak test compares them.
type Stats struct {
	Sandboxes int            `json:"sandboxes"`
	Pooled    int            `json:"pooled"`
	Lacking   int            `json:"lacking"` // shells that pools have yet to make
	Zygotes   []ZygoteStats  `json:"zygotes"`
	Dying     int            `json:"dying"`
	Slots     int            `json:"slots"`
	FDs       int            `json:"fds"`
	Goroutine int            `json:"goroutines"`
	CPUMS     int64          `json:"cpu_ms"`       // of all sandboxes since the maker began, zygotes included
	Memory    int64          `json:"memory_bytes"` // of the same now
	Timings   map[string]any `json:"timings,omitempty"`
	Disk      *DiskStats     `json:"disk,omitempty"`
}

// DiskStats is the file system of the sandboxes' disks, in bytes.
type DiskStats struct {
	Total     int64 `json:"total"`
	Free      int64 `json:"free"`
	Reserve   int64 `json:"reserve"`   // that stays free
	Used      int64 `json:"used"`      // by disks of sandboxes, snapshots and volumes
	Promised  int64 `json:"promised"`  // what disks and volumes may write beyond that
	Unwritten int64 `json:"unwritten"` // that sandboxes have written to memory only
}

// ZygoteStats is one zygote.
type ZygoteStats struct {
	Template string `json:"template"`
	Tenant   string `json:"tenant"`
	PID      int    `json:"pid"`
	Forks    int    `json:"forks"`
	Live     int    `json:"live"`
	RSSKB    int64  `json:"rss_kb"`
}

// Response answers a Request.
type Response struct {
	Fault     *Fault             `json:"fault,omitempty"`
	Hello     *Hello             `json:"hello,omitempty"`
	Instances []sandbox.Instance `json:"instances,omitempty"`
	Ended     *sandbox.Ended     `json:"ended,omitempty"`
	Usage     *sandbox.Usage     `json:"usage,omitempty"`
	Stats     *Stats             `json:"stats,omitempty"`
	Token     string             `json:"token,omitempty"`  // start, kernel: names the kernel that was forked from a zygote
	Waited    bool               `json:"waited,omitempty"` // start: that kernel had been waiting, with all that was asked for
	Tokens    []string           `json:"tokens,omitempty"` // fork: of each child's kernel, in their order
	Cut       bool               `json:"cut,omitempty"`    // fork: files and memory are taken, the parent may go on; another response follows
	Forked    *sandbox.Forked    `json:"forked,omitempty"`
	Template  *template.Template `json:"template,omitempty"`
	Layers    []sandbox.Layer    `json:"layers,omitempty"`
	Freed     int64              `json:"freed,omitempty"` // bytes
	Volumes   []sandbox.Volume   `json:"volumes,omitempty"`
}

// Fault is an error on the wire.
type Fault struct {
	Kind    fault.Kind `json:"kind"`
	Message string     `json:"message"`
	Detail  string     `json:"detail,omitempty"` // the chain, for the operator's log
}

// Failed turns an error into a response.
func Failed(err error) Response {
	return Response{Fault: &Fault{Kind: fault.KindOf(err), Message: fault.Message(err), Detail: err.Error()}}
}

// Err is the error that a response carries.
func (r Response) Err() error {
	if r.Fault == nil {
		return nil
	}
	if r.Fault.Detail == "" || r.Fault.Detail == r.Fault.Message {
		return fault.New(r.Fault.Kind, "%s", r.Fault.Message)
	}
	return fault.Wrap(r.Fault.Kind, errors.New(r.Fault.Detail), "%s", r.Fault.Message)
}

// MaxMessage bounds one message; a list is paged to stay below it.
const MaxMessage = 128 << 10

// Send writes one message with descriptors, which stay open here.
func Send(c *net.UnixConn, value any, files ...*os.File) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return SendBytes(c, data, files...)
}

// ErrTooLarge says that a message is over MaxMessage. Nothing was sent: the connection is as good
// as before.
var ErrTooLarge = errors.New("the message is too large")

// SendBytes sends a message that is written already.
func SendBytes(c *net.UnixConn, data []byte, files ...*os.File) error {
	if len(data) > MaxMessage {
		return fmt.Errorf("%w: %d bytes, the limit is %d", ErrTooLarge, len(data), MaxMessage)
	}
	return Hold(files, func(fds []int) error {
		var control []byte
		if len(fds) > 0 {
			control = unix.UnixRights(fds...)
		}
		_, _, err := c.WriteMsgUnix(data, control, nil)
		return err
	})
}

// ErrNotHeld says that a descriptor was closed before it could be sent. Nothing was: the connection is as good as before.
var ErrNotHeld = errors.New("a descriptor that is closed")

// Hold gives the numbers of descriptors to f and keeps every one open until f is done: a number that was closed and
// used again would name somebody else's.
func Hold(files []*os.File, f func(fds []int) error) error {
	fds := make([]int, 0, len(files))
	var hold func(rest []*os.File) error
	hold = func(rest []*os.File) error {
		if len(rest) == 0 {
			return f(fds)
		}
		raw, err := rest[0].SyscallConn()
		var inner error
		if err == nil {
			err = raw.Control(func(fd uintptr) {
				fds = append(fds, int(fd))
				inner = hold(rest[1:])
			})
		}
		if err != nil {
			err = errors.Join(ErrNotHeld, err)
		}
		return errors.Join(err, inner)
	}
	return hold(files)
}

// buffers are used again: a new one for every message kept the garbage collector of maker and server at work.
var buffers = sync.Pool{New: func() any { return new([MaxMessage]byte) }}

// Receive reads one message and its descriptors; io.EOF when the peer is gone.
func Receive(c *net.UnixConn, value any) ([]*os.File, error) {
	buf := buffers.Get().(*[MaxMessage]byte)[:]
	defer buffers.Put((*[MaxMessage]byte)(buf))
	control := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, cn, flags, _, err := c.ReadMsgUnix(buf, control)
	if err != nil {
		return nil, err
	}
	files, ferr := parseFiles(control[:cn])
	if ferr == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		ferr = errors.New("message is cut off")
	}
	if ferr == nil && n == 0 {
		ferr = io.EOF
	}
	if ferr == nil {
		ferr = json.Unmarshal(buf[:n], value)
	}
	if ferr != nil {
		CloseAll(files)
		return nil, ferr
	}
	return files, nil
}

// maxFiles is how many descriptors one message has at most: the answer to a fork has one of each
// copy.
const maxFiles = sandbox.MaxForks

func parseFiles(control []byte) ([]*os.File, error) {
	if len(control) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

// CloseAll closes descriptors that nobody wants.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// AwaitEnd waits until the peer's process is gone and its end of the connection with it.
func AwaitEnd(c *net.UnixConn) {
	var b [1]byte
	_, _ = c.Read(b[:])
}

// Pair makes two connected sockets of a type: the first is to be kept and does not block, the second is to be given to
// a process that may be too simple to wait in any other way.
func Pair(kind int) (mine, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pair"), os.NewFile(uintptr(fds[1]), "pair"), nil
}

// Pipe makes a pipe to be given away: unlike os.Pipe's, its ends block, since a program does not expect its stdout to
// refuse a write.
func Pipe() (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// Conn turns one end of a Pair into a connection; the file is closed.
func Conn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

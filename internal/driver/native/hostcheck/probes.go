package hostcheck

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	nobody = 65534
	// allNamespaces is what every sandbox gets.
	allNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	madvCollapse  = 25 // MADV_COLLAPSE, Linux 6.1
)

// onThrowawayThread runs f on a thread that ends with it, and with the thread whatever namespaces and ids f gave it.
// The process's first thread never ends, so f is kept away from it.
func onThrowawayThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- onThrowawayThread(f) // on another thread: this one is taken
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// tryUserNamespace creates a sandbox's namespaces the way the maker does: with an effective uid that is not root.
func tryUserNamespace() error {
	return onThrowawayThread(func() error {
		const keep = ^uintptr(0)
		// Not syscall.Setresuid: that would change every thread of this process.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, nobody, keep); errno != 0 {
			return fmt.Errorf("set effective uid: %w", errno)
		}
		cmd := exec.Command("/bin/true")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: allNamespaces}
		return cmd.Run()
	})
}

// tryLayers makes an overlay over an idmapped view of lower, with its upper layer in data.
func tryLayers(lower, data string) (err error) {
	tmp, err := os.MkdirTemp(data, ".cove-doctor-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	for _, dir := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(tmp, dir), 0o755); err != nil {
			return err
		}
	}
	users, release, err := userNamespace()
	if err != nil {
		return fmt.Errorf("user namespace: %w", err)
	}
	defer release()
	return onThrowawayThread(func() error { return mountLayers(tmp, lower, users) })
}

// mountLayers runs in a mount namespace that ends with its thread.
func mountLayers(tmp, lower string, users int) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("new mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, lower, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree %s: %w", lower, err)
	}
	defer unix.Close(tree)
	idmap := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Userns_fd: uint64(users)}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, idmap); err != nil {
		return fmt.Errorf("idmapped mount of %s: %w", lower, err)
	}
	at := filepath.Join(tmp, "lower")
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	options := fmt.Sprintf("userxattr,lowerdir=%s,upperdir=%s/upper,workdir=%s/work", at, tmp, tmp)
	if err := unix.Mount("overlay", filepath.Join(tmp, "merged"), "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

// userNamespace is one with 65,536 ids mapped, held by a process that waits until release.
func userNamespace() (fd int, release func(), err error) {
	cmd := exec.Command("/bin/cat")
	cmd.Dir = "/"
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1 << 20, Size: 1 << 16}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL}
	hold, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, err
	}
	// Pdeathsig follows the thread that starts the process, so that thread must stay ours until the end.
	runtime.LockOSThread()
	if err := cmd.Start(); err != nil {
		runtime.UnlockOSThread()
		return 0, nil, err
	}
	stop := func() {
		hold.Close()
		_ = cmd.Wait() // cat ends with its input; how does not matter
		runtime.UnlockOSThread()
	}
	fd, err = unix.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		stop()
		return 0, nil, err
	}
	return fd, func() { unix.Close(fd); stop() }, nil
}

// inNetwork runs f with a descriptor of a network namespace that ends with it.
func inNetwork(f func(ns int) error) error {
	return onThrowawayThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace: %w", err)
		}
		ns, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		return f(ns)
	})
}

func tryFirewall() error {
	return inNetwork(func(ns int) error {
		c, err := nftables.New(nftables.WithNetNSFd(ns))
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Name: "cove_doctor", Family: nftables.TableFamilyIPv4})
		set := &nftables.Set{Table: table, Name: "allowed", KeyType: nftables.TypeIPAddr}
		if err := c.AddSet(set, []nftables.SetElement{{Key: []byte{192, 0, 2, 1}}}); err != nil {
			return err
		}
		forward := c.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
		c.AddRule(&nftables.Rule{Table: table, Chain: forward, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, &expr.Payload{DestRegister: 2, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Lookup{SourceRegister: 2, SetName: set.Name, SetID: set.ID}, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop},
		}})
		after := c.AddChain(&nftables.Chain{Table: table, Name: "after", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
		c.AddRule(&nftables.Rule{Table: table, Chain: after, Exprs: []expr.Any{&expr.Masq{}}})
		return c.Flush()
	})
}

func tryVeth() error {
	return inNetwork(func(int) error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "covedoctor0"}, PeerName: "covedoctor1"})
	})
}

// droppingForwardChains are the host's base chains that drop forwarded packets no rule accepts.
func droppingForwardChains() ([]string, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, chain := range chains {
		ours := len(chain.Table.Name) >= 4 && chain.Table.Name[:4] == "cove"
		if chain.Hooknum != nil && *chain.Hooknum == *nftables.ChainHookForward && chain.Type == nftables.ChainTypeFilter &&
			chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop && !ours {
			names = append(names, chain.Table.Name+"/"+chain.Name)
		}
	}
	return names, nil
}

// tryCgroup makes and removes a group.
func tryCgroup(at string) error {
	dir, err := os.MkdirTemp(at, "cove-doctor-")
	if err != nil {
		return err
	}
	return unix.Rmdir(dir)
}

func namelessFile(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "probe"), nil
}

// tryReflink copies a file of a directory by reference; none of the two has a name.
func tryReflink(dir string) error {
	from, err := namelessFile(dir)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := namelessFile(dir)
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := from.Write(make([]byte, 64<<10)); err != nil {
		return err
	}
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
}

// canCollapse asks for one huge page the way zygotes do.
func canCollapse() bool {
	const size = 4 << 20
	memory, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Munmap(memory) }()
	for i := 0; i < size; i += 4096 {
		memory[i] = 1
	}
	err = unix.Madvise(memory, madvCollapse)
	return !errors.Is(err, unix.EINVAL)
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

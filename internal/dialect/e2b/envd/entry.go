package envd

import (
	"io/fs"
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb"
)

// metadataPrefix begins the names of the attributes that hold a file's metadata.
const metadataPrefix = "user.e2b."

// entryInfo is an entry as E2B shows it. A link has its target's permission bits, and its type if
// the target is a file or a directory. Every other link has the type symlink.
//
// The SDKs leave out entries without a type: a link to /dev/null would be missing from a list.
func entryInfo(e *agentapi.Entry) *envdpb.EntryInfo {
	info := &envdpb.EntryInfo{
		Name: e.Name, Path: e.Path, Size: e.Size, Type: fileType(e.Type), Mode: e.Mode & 0o777,
		Permissions: fileMode(e).String(), Owner: orNumber(e.User, e.UID), Group: orNumber(e.Group, e.GID),
		ModifiedTime: timestamppb.New(e.ModTime), Metadata: metadataOf(e.Xattrs),
	}
	if e.Type != agentapi.EntrySymlink {
		return info
	}
	info.IsSymlink = true
	to := e.Path // what leads nowhere is its own target
	info.Type, info.Mode = envdpb.FileType_FILE_TYPE_SYMLINK, 0
	if e.Link != nil {
		to, info.Mode = e.Link.Path, e.Link.Mode&0o777
		if e.Link.Type == agentapi.EntryFile || e.Link.Type == agentapi.EntryDir {
			info.Type = fileType(e.Link.Type)
		}
	}
	info.SymlinkTarget = &to
	return info
}

func fileType(t agentapi.EntryType) envdpb.FileType {
	switch t {
	case agentapi.EntryFile:
		return envdpb.FileType_FILE_TYPE_FILE
	case agentapi.EntryDir:
		return envdpb.FileType_FILE_TYPE_DIRECTORY
	case agentapi.EntrySymlink:
		return envdpb.FileType_FILE_TYPE_SYMLINK
	case agentapi.EntryOther:
	}
	return envdpb.FileType_FILE_TYPE_UNSPECIFIED
}

// fileMode is an entry's mode in the words of Go, in which E2B spells permissions.
func fileMode(e *agentapi.Entry) fs.FileMode {
	mode := fs.FileMode(e.Mode & 0o777)
	for bit, word := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if e.Mode&bit != 0 {
			mode |= word
		}
	}
	switch e.Type {
	case agentapi.EntryDir:
		mode |= fs.ModeDir
	case agentapi.EntrySymlink:
		mode |= fs.ModeSymlink
	case agentapi.EntryOther:
		mode |= specialMode(e.Special)
	case agentapi.EntryFile:
	}
	return mode
}

func specialMode(s agentapi.Special) fs.FileMode {
	switch s {
	case agentapi.SpecialPipe:
		return fs.ModeNamedPipe
	case agentapi.SpecialSocket:
		return fs.ModeSocket
	case agentapi.SpecialChar:
		return fs.ModeDevice | fs.ModeCharDevice
	case agentapi.SpecialBlock:
		return fs.ModeDevice
	}
	return fs.ModeIrregular
}

func orNumber(name string, id int) string {
	if name != "" {
		return name
	}
	return strconv.Itoa(id)
}

func metadataOf(xattrs map[string]string) map[string]string {
	var found map[string]string
	for name, value := range xattrs {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if !ok {
			continue
		}
		if found == nil {
			found = map[string]string{}
		}
		found[key] = value
	}
	return found
}

package agentapi_test

import (
	"bytes"
	"hash/fnv"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

func TestAMarkIsThatOfAFileAsItIs(t *testing.T) {
	for _, text := range []string{"", "a", "1 2 3 4 a/b.csv", strings.Repeat("\xff", 1000)} {
		want := fnv.New128a()
		want.Write([]byte(text))
		if got := agentapi.MarkOf(text); !bytes.Equal(got[:], want.Sum(nil)) {
			t.Errorf("%.20q has %x", text, got)
		}
	}
	f := agentapi.Found{Path: "a", Size: 1, Mod: 2, Change: 3, Inode: 4}
	refused := f
	refused.Refused = "for some reason"
	if f.Mark() != refused.Mark() {
		t.Error("what is said of a file is no part of it")
	}
	for _, other := range []agentapi.Found{{Path: "b", Size: 1, Mod: 2, Change: 3, Inode: 4}, {Path: "a", Size: 1, Mod: 2, Change: 3, Inode: 5}} {
		if other.Mark() == f.Mark() {
			t.Errorf("%+v is another", other)
		}
	}
}

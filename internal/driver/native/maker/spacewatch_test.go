package maker

import (
	"maps"
	"testing"
	"time"
)

func newTestWatch() *spaceWatch { return &spaceWatch{baseline: map[fileSystem]diskUse{}} }

// TestNote_Baseline has the disk leave and enter its reserve: the growth that counts is that since a
// time when there was room.
func TestNote_Baseline(t *testing.T) {
	k, u := &disk{}, &volume{}
	begin := time.Unix(1_800_000_000, 0)
	type look struct {
		at     time.Duration
		isRoom bool
		disk   int64
		volume int64 // 0: no sandbox has it yet
	}
	for name, c := range map[string]struct {
		looks []look
		want  map[fileSystem]diskUse
	}{
		"a steady disk": {
			[]look{{0, true, 1, 1}, {roomTime, true, 2, 2}, {2 * roomTime, true, 3, 3}},
			map[fileSystem]diskUse{k: {2, 0}, u: {2, 0}},
		},
		"a moment of room": {
			[]look{{0, true, 1, 1}, {roomTime, true, 2, 2}, {roomTime + 1, false, 50, 50}, {roomTime + 2, true, 60, 60}, {roomTime + 3, false, 70, 70}},
			map[fileSystem]diskUse{k: {1, 0}, u: {1, 0}},
		},
		"moments of room for long": {
			[]look{{0, true, 1, 1}, {roomTime, true, 2, 2}, {roomTime + 1, false, 50, 50}, {roomTime + baselineTime, true, 60, 60}, {roomTime + baselineTime + 1, false, 70, 70}},
			map[fileSystem]diskUse{k: {60, 0}, u: {60, 0}},
		},
		"a volume that comes later": {
			[]look{{0, true, 1, 0}, {time.Second, true, 1, 7}, {roomTime, true, 1, 9}},
			map[fileSystem]diskUse{k: {1, 0}, u: {7, 0}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestWatch()
			w.based = begin
			for _, l := range c.looks {
				bytes := map[fileSystem]diskUse{k: {l.disk, 0}}
				if l.volume > 0 {
					bytes[u] = diskUse{l.volume, 0}
				}
				w.note(begin.Add(l.at), l.isRoom, bytes)
			}
			if !maps.Equal(w.baseline, c.want) {
				t.Errorf("the baseline is %v, want %v (disk %p, volume %p)", w.baseline, c.want, k, u)
			}
		})
	}
}

// TestFills has two tenants write: whose sandboxes are stopped depends on which of them filled the
// disk, and on how little is left.
func TestFills(t *testing.T) {
	marks := spaceMarks{end: 256 << 20}
	much := marks.end / 8
	for name, c := range map[string]struct {
		lately, earlier int64 // grown in the last seconds, and before these since the baseline
		left            int64
		want            bool
	}{
		"much in the last seconds":       {much, 0, 2 * marks.end, true},
		"little":                         {much - 1, 0, marks.end, false},
		"much before":                    {1, much, marks.end, false},
		"much before, little space left": {1, much, marks.end - 1, true},
		"little, little space left":      {much - 1, 0, marks.end / 4, false},
		"little, next to no space left":  {1, 0, marks.end/4 - 1, true},
		"deleted much before, and little in the last seconds": {1, -much, marks.end / 4, false},
	} {
		t.Run(name, func(t *testing.T) {
			mine, theirs := writer{l: &live{tenant: "acme"}, disk: &disk{}}, writer{l: &live{tenant: "umbrella"}, disk: &disk{}}
			w := newTestWatch()
			const had = 1 << 30
			w.baseline = map[fileSystem]diskUse{mine.disk: {had, 0}, theirs.disk: {had, 0}}
			w.early = map[fileSystem]diskUse{mine.disk: {had + c.earlier, 0}, theirs.disk: {had, 0}}
			use := spaceUse{
				writers: []writer{mine, theirs},
				bytes:   map[fileSystem]diskUse{mine.disk: {had + c.earlier + c.lately, 0}, theirs.disk: {had + 8*much, 0}},
			}
			if got := w.fills(use, c.left, marks)(mine); got != c.want {
				t.Errorf("its sandboxes fill the disk: %v, want %v", got, c.want)
			}
		})
	}
}

package maker

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// spaceWatch stops and ends sandboxes so that the host's disk never becomes full: a write of a loop
// device that fails damages the disk of any sandbox, and its processes do not hear of it.
//
// What counts as free is what the host's file system says less what sandboxes have written to
// memory only: that goes to the images also when they are stopped.
type spaceWatch struct {
	m *Maker

	// baseline is what each had when there had been room for roomTime, or up to twice as long; a
	// volume that was seen later is in it as it was then. nextBaseline takes its place.
	baseline, nextBaseline map[fileSystem]diskUse
	based                  time.Time // when baseline took effect
	roomSince              time.Time // when nextBaseline was measured; zero: there is no room

	before map[fileSystem]diskUse // and at the beginning of this window
	window time.Time
	// early is what each had slowWindow ago, or up to twice as long, or at the last look with room
	// if that was later. later takes its place.
	early, later map[fileSystem]diskUse
	slow         time.Time // when later was measured
	read         time.Time // when the operator's rules were read
	unread       error     // why they could not be read last
	held         []*live   // stopped, in order
	since        time.Time
	ended        time.Time        // when one was ended last
	coming       map[*shell]int64 // space that will be free when sandboxes that were ended are gone
}

// baselineTime is the age at which the baseline is replaced at the next moment of room, however short:
// a tenant that keeps the disk nearly full must not have others blamed for hours of growth.
const baselineTime = 5 * time.Minute

const (
	roomTime     = 30 * time.Second // a moment of room does not make what was written before it forgotten
	growthWindow = 250 * time.Millisecond
	slowWindow   = 5 * time.Second  // for sandboxes that write little at a time
	growthNoise  = 1 << 20          // a sandbox that grows less in a window is not stopped
	leastGrowth  = 64 << 10         // and while there is hardly any space, one that grows less than this
	holdTime     = 10 * time.Second // how long sandboxes wait for space before one of them is ended
	endTime      = 2 * time.Second  // how long the space of one that was ended may take to come back
	slowestLook  = time.Second
	fastestLook  = 5 * time.Millisecond
)

// writeSpeed bounds how many bytes a second the sandboxes of a host can write, to memory at first.
func writeSpeed() int64 { return int64(min(runtime.NumCPU(), 8)) * 3 << 29 }

// watchSpace looks at the host's disk until the maker closes.
func (m *Maker) watchSpace() {
	w := &spaceWatch{m: m, baseline: map[fileSystem]diskUse{}, before: map[fileSystem]diskUse{}, coming: map[*shell]int64{}}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-m.closed:
			return
		}
		wait := slowestLook
		if err := w.look(time.Now(), &wait); err != nil {
			m.log.Error("look at the disk's free space", "error", err)
		}
		timer.Reset(wait)
	}
}

// look does what is to be done now, and says when to look again.
func (w *spaceWatch) look(now time.Time, wait *time.Duration) error {
	if now.Sub(w.read) >= slowestLook {
		w.read = now
		w.readReserve()
	}
	s, err := w.m.space.now()
	if err != nil {
		return err
	}
	marks := w.m.space.marks(s)
	room := s.free - w.m.groups.Unwritten()
	w.measure(now, room >= marks.refuse)
	switch {
	case room >= marks.resume:
		w.release()
	case room < marks.end:
		w.stop(now, leastGrowth, room, marks)
		w.endLargest(now, room+w.stillComing(), s.free, marks)
	case room < marks.stop:
		w.stop(now, growthNoise, room, marks)
	}
	if len(w.held) > 0 {
		w.stopAgain()
		if now.Sub(w.since) > holdTime {
			w.endLargest(now, room+w.stillComing(), s.free, marks)
		}
	}
	*wait = w.next(room, marks)
	return nil
}

// next is when the free space may have come to the next mark at the earliest.
func (w *spaceWatch) next(room int64, marks spaceMarks) time.Duration {
	for _, mark := range []int64{marks.stop, marks.end, marks.end / 4} {
		if room > mark {
			far := time.Duration(float64(room-mark) / float64(writeSpeed()) * float64(time.Second))
			return min(max(far, fastestLook), slowestLook)
		}
	}
	return fastestLook
}

// measure notes how much each sandbox has on the host's disk.
func (w *spaceWatch) measure(now time.Time, isRoom bool) {
	if !isRoom && now.Sub(w.window) < growthWindow {
		return
	}
	w.window = now
	use := w.m.spaceUse()
	w.note(now, isRoom, use.bytes)
	s := w.m.space
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disks = use.totals
}

// note keeps what each has for the looks that ask how much it has grown.
func (w *spaceWatch) note(now time.Time, isRoom bool, bytes map[fileSystem]diskUse) {
	w.before = bytes
	switch {
	case !isRoom:
		w.roomSince = time.Time{}
	case w.roomSince.IsZero():
		w.nextBaseline, w.roomSince = bytes, now
		if now.Sub(w.based) >= baselineTime {
			w.rebase(now, bytes)
		}
	case now.Sub(w.roomSince) >= roomTime:
		w.rebase(now, bytes)
		w.nextBaseline, w.roomSince = bytes, now
	}
	if isRoom {
		w.later = bytes
	}
	if isRoom || now.Sub(w.slow) >= slowWindow {
		w.early, w.later, w.slow = w.later, bytes, now
	}
	for p, n := range bytes {
		_, isVolume := p.(*volume)
		if _, known := w.baseline[p]; isVolume && !known {
			w.baseline[p] = n
		}
	}
}

// rebase puts the next baseline in the place of the present one. A volume that was seen between the
// two keeps what it had then.
func (w *spaceWatch) rebase(now time.Time, bytes map[fileSystem]diskUse) {
	earlier := w.baseline
	w.baseline, w.based = maps.Clone(w.nextBaseline), now
	for p := range bytes {
		n, wasKnown := earlier[p]
		if _, known := w.baseline[p]; wasKnown && !known {
			w.baseline[p] = n
		}
	}
}

// growing are sandboxes that have grown by some bytes since an earlier moment, the one that has
// grown most since there was room first. The first bytes of a new disk are the file system's own.
func (w *spaceWatch) growing(use spaceUse, since map[fileSystem]diskUse, least int64) []writer {
	var all []writer
	for _, s := range use.writers {
		atLeast := least
		if _, known := since[s.disk]; s.disk != nil && !known {
			atLeast = max(least, growthNoise)
		}
		if use.grownBy(s, since) >= atLeast {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b writer) int { return cmp.Compare(use.grownBy(b, w.baseline), use.grownBy(a, w.baseline)) })
	return all
}

// fills reports whose sandboxes fill the disk: those of a tenant that have grown much in the last
// seconds, or since the baseline when there is little space left, and all of them when there is
// next to none. A sandbox that writes a little beside those goes on.
func (w *spaceWatch) fills(use spaceUse, left int64, marks spaceMarks) func(s writer) bool {
	lately, all := use.grownByTenant(w.early), use.grownByTenant(w.baseline)
	return func(s writer) bool {
		much := marks.end / 8
		return lately[s.l.tenant] >= much || left < marks.end && all[s.l.tenant] >= much || left < marks.end/4
	}
}

// stop has sandboxes that grow stand still. Where the host cannot do that they are ended.
func (w *spaceWatch) stop(now time.Time, least, left int64, marks spaceMarks) {
	use := w.m.spaceUse()
	fills := w.fills(use, left, marks)
	for _, s := range w.growing(use, w.before, least) {
		l := s.l
		if slices.Contains(w.held, l) || !fills(s) {
			continue
		}
		if len(w.held) == 0 {
			w.since = now
		}
		w.held = append(w.held, l)
		l.setHeld(true)
		if err := l.shell.group.StartFreeze(); err != nil {
			w.m.log.Error("stop a sandbox that fills the disk", "sandbox", l.id, "error", err)
			w.end(l, "the server's disk was nearly full, and this sandbox, which was writing to it, could not be stopped")
			continue
		}
		w.m.log.Warn("the disk is nearly full: a sandbox that writes is stopped", "sandbox", l.id, "tenant", l.tenant)
	}
}

// stopAgain stops what was born meanwhile, and forgets what has ended.
func (w *spaceWatch) stopAgain() {
	w.held = slices.DeleteFunc(w.held, func(l *live) bool {
		select {
		case <-l.over:
			return true
		default:
		}
		if !l.isEnding() {
			_ = l.shell.group.StartFreeze() // it was possible before
		}
		return false
	})
}

// release lets sandboxes go on that were stopped for want of space. One that is being paused or
// copied goes on at a later look.
func (w *spaceWatch) release() {
	w.held = slices.DeleteFunc(w.held, func(l *live) bool {
		if l.isEnding() {
			return true
		}
		if !l.turn.TryLock() {
			return false
		}
		defer l.turn.Unlock()
		l.setHeld(false)
		if l.isPaused() {
			return true
		}
		if err := l.shell.group.Thaw(); err != nil {
			w.m.log.Error("let a sandbox go on", "sandbox", l.id, "error", err)
			return false
		}
		w.m.log.Info("the disk has space again: a sandbox goes on", "sandbox", l.id, "tenant", l.tenant)
		return true
	})
}

// endLargest ends the sandbox that has written most since there was room, of the tenant whose
// sandboxes have. Then it waits for the space of that sandbox, unless left, the free bytes with
// those that are still coming, is too little to wait. Sandboxes that write little at a time are
// waited for longer. Those that have written next to nothing are ended only if the sandboxes of their
// tenant have written much together in the last seconds.
func (w *spaceWatch) endLargest(now time.Time, left, free int64, marks spaceMarks) {
	waited := now.Sub(w.ended) >= endTime
	if !waited && left >= marks.end && free >= marks.end/4 {
		return
	}
	use := w.m.spaceUse()
	ofTenant := use.grownByTenant(w.baseline)
	fast, slow := w.growing(use, w.before, leastGrowth), w.growing(use, w.early, leastGrowth)
	if left < marks.end/4 {
		lately := use.grownByTenant(w.early)
		little := w.growing(use, w.early, 1)
		slow = append(slow, slices.DeleteFunc(little, func(s writer) bool { return lately[s.l.tenant] < growthNoise })...)
	}
	isHeld := func(s writer) bool { return slices.Contains(w.held, s.l) }
	isFast := func(s writer) bool { return isHeld(s) || containsWriter(fast, s) }
	fills := w.fills(use, left, marks)
	candidates := slices.DeleteFunc(slices.Clone(use.writers), func(s writer) bool {
		return s.l.isEnding() || !isHeld(s) && (!fills(s) || !isFast(s) && !containsWriter(slow, s))
	})
	if len(candidates) == 0 {
		return
	}
	written := func(s writer) int64 { return use.grownBy(s, w.baseline) }
	largest := slices.MaxFunc(candidates, func(a, b writer) int {
		return cmp.Or(cmp.Compare(ofTenant[a.l.tenant], ofTenant[b.l.tenant]), cmp.Compare(written(a), written(b)))
	})
	if !waited && !isFast(largest) && left >= marks.end/2 {
		return
	}
	l := largest.l
	w.ended = now
	w.coming[l.shell] = l.shell.group.Unwritten()
	if k := largest.disk; k != nil {
		w.coming[l.shell] += allocated(k.image)
	}
	w.m.log.Warn("the disk is nearly full: a sandbox is ended", "sandbox", l.id, "tenant", l.tenant, "written", written(largest))
	w.end(l, "the server's disk was nearly full, and of the sandboxes that were writing to it this one had written the most")
	w.endVolumes(use, largest)
}

func containsWriter(all []writer, s writer) bool {
	return slices.ContainsFunc(all, func(o writer) bool { return o.l == s.l })
}

// stillComing is the space of sandboxes that were ended and are not gone yet.
func (w *spaceWatch) stillComing() (bytes int64) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	going := maps.Clone(w.m.dying)
	for _, l := range w.m.sandboxes {
		going[l.shell] = struct{}{}
	}
	for s, n := range w.coming {
		if _, ok := going[s]; ok {
			bytes += n
		} else {
			delete(w.coming, s)
		}
	}
	return bytes
}

// end ends a sandbox. Nothing more of it reaches its disk, whose space is free when its last
// process is gone.
func (w *spaceWatch) end(l *live, why string) {
	l.decide(sandbox.CauseHostDiskFull, why, w.m.usage(l))
	if l.shell.disk != nil {
		l.shell.disk.cutOff()
	}
	l.shell.end()
	l.insist()
}

// endVolumes shuts down the volumes that an ended sandbox was filling: what it has written to
// memory only would reach the host's disk after its end. Other sandboxes of its tenant that have
// one of them end too. One that is starting at this moment is refused by register.
func (w *spaceWatch) endVolumes(use spaceUse, ended writer) {
	for _, u := range ended.volumes {
		if use.grown(u, w.baseline) < growthNoise {
			continue
		}
		u.cutOff()
		for _, s := range w.m.writers() {
			if slices.Contains(s.volumes, u) && !s.l.isEnding() {
				w.end(s.l, "the server's disk was nearly full, and a volume of this sandbox was being filled")
			}
		}
	}
}

// setHeld notes that a sandbox is stopped for want of space.
func (l *live) setHeld(held bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = held
}

func (l *live) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held
}

func (l *live) isEnding() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause != ""
}

func errHeld(l *live) error {
	return fault.New(fault.DiskFull, "the server's disk is full: sandbox %s, which was writing to it, waits until there is more space", l.id)
}

// readReserve reads what the operator says now: a server that starts later may say something else.
// What was read before holds where that fails.
func (w *spaceWatch) readReserve() {
	rules, err := readStorage(w.m.cfg.DataDir)
	if err != nil {
		if w.unread == nil {
			w.m.log.Error("read the rules of storage", "error", err)
		}
		w.unread = err
		return
	}
	w.unread = nil
	w.m.space.mu.Lock()
	defer w.m.space.mu.Unlock()
	w.m.space.reserve, w.m.space.maxTenant = rules.Reserve, rules.MaxTenantSize
}

// openSpace opens the account of the file system of a directory.
func openSpace(dir string) (*diskSpace, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open account of disk space: %w", err)
	}
	s, err := spaceOf(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open account of disk space: %w", err)
	}
	return &diskSpace{dir: f, total: s.total, granted: map[uint64]int64{}}, nil
}

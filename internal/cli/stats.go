package cli

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/client"
)

// sample is what one sandbox uses at one moment.
type sample struct {
	At       time.Time `json:"at"`
	ID       string    `json:"id"`
	State    string    `json:"state"`
	Template string    `json:"template"`
	Key      string    `json:"key,omitempty"`
	// CPUPercent is of one CPU, since the sample before.
	CPUPercent       float64 `json:"cpu_percent"`
	CPUMS            int64   `json:"cpu_ms"`
	MemoryBytes      int64   `json:"memory_bytes"`
	MemoryLimitBytes int64   `json:"memory_limit_bytes,omitempty"`
	Pids             int     `json:"pids"`
	PidsLimit        int     `json:"pids_limit,omitempty"`
	DiskBytes        int64   `json:"disk_bytes"`
	DiskLimitBytes   int64   `json:"disk_limit_bytes,omitempty"`

	info client.SandboxInfo
}

// sampler asks what sandboxes use. That does not count as use of them.
type sampler struct {
	c    *client.Client
	ids  []string // which; empty: all that live
	last map[string]sample
}

// measure asks twice where nothing is known yet: processor time is a difference.
func (s *sampler) measure(ctx context.Context) ([]sample, error) {
	if s.last == nil {
		if _, err := s.ask(ctx); err != nil {
			return nil, err
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.ask(ctx)
}

func (s *sampler) ask(ctx context.Context) ([]sample, error) {
	list, err := s.list(ctx)
	if err != nil {
		return nil, err
	}
	samples := make([]sample, len(list))
	errs := make([]error, len(list))
	var asking sync.WaitGroup
	turn := make(chan struct{}, 16)
	for i, info := range list {
		turn <- struct{}{}
		asking.Go(func() {
			defer func() { <-turn }()
			samples[i], errs[i] = s.one(ctx, info)
		})
	}
	asking.Wait()
	last := map[string]sample{}
	all := []sample{}
	for i, one := range samples {
		switch {
		case errs[i] == nil:
			all, last[one.ID] = append(all, one), one
		case client.KindOf(errs[i]) != client.NotFound && client.KindOf(errs[i]) != client.Gone: // those have ended meanwhile
			return nil, errs[i]
		}
	}
	s.last = last
	return all, nil
}

func (s *sampler) list(ctx context.Context) (list []client.SandboxInfo, err error) {
	for _, id := range s.ids {
		sb, err := s.c.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		list = append(list, sb.SandboxInfo)
	}
	if len(s.ids) > 0 {
		return list, nil
	}
	for sb, err := range s.c.List(ctx, client.ListRequest{States: living, Limit: 1000}) {
		if err != nil {
			return nil, err
		}
		list = append(list, sb)
	}
	return list, nil
}

func (s *sampler) one(ctx context.Context, info client.SandboxInfo) (sample, error) {
	x := sample{
		ID: info.ID, State: info.State, Template: info.Template, Key: info.Key, info: info,
		MemoryLimitBytes: info.Limits.MemoryBytes, PidsLimit: info.Limits.Pids, DiskLimitBytes: info.Limits.DiskBytes,
	}
	var u client.SandboxUsage
	var err error
	switch info.State {
	case "running", "paused":
		u, err = s.c.Sandbox(info.ID).Usage(ctx)
	case "ended":
		if info.Usage != nil {
			u = *info.Usage
		}
	}
	x.At, x.CPUMS, x.MemoryBytes, x.Pids, x.DiskBytes = time.Now(), u.CPUMS, u.MemoryBytes, u.Pids, u.DiskBytes
	if before, known := s.last[info.ID]; known {
		x.CPUPercent = max(float64(x.CPUMS-before.CPUMS), 0) / float64(max(x.At.Sub(before.At).Milliseconds(), 1)) * 100
	}
	return x, err
}

// pace is how often a live view is drawn again, and whether it is live at all.
type pace struct {
	once  bool
	every time.Duration
}

func (p *pace) register(c *cobra.Command) {
	c.Flags().BoolVar(&p.once, "no-stream", false, "print once and end")
	c.Flags().DurationVar(&p.every, "interval", 2*time.Second, "how often to look")
	completeFlag(c, "interval", cobra.NoFileCompletions)
}

// view is one way to show samples.
type view struct {
	whole bool                                                       // it wants the whole terminal
	value func(all []sample) any                                     // as one value of JSON
	each  func(all []sample) []any                                   // as values of a stream
	lines func(all []sample, width int, colour bool) (text []string) // for people; zero width is any
}

// watch shows samples: once, as lines of JSON, or live on a terminal until q or Ctrl-C.
func (a *invocation) watch(ctx context.Context, s *sampler, p pace, v view) error {
	if p.every < 100*time.Millisecond {
		return usageError{fmt.Errorf("--interval %v: want at least 100ms", p.every)}
	}
	f, live := terminal(a.Out)
	if p.once || !live && !a.json {
		return a.watchOnce(ctx, s, v)
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	if a.json {
		return s.repeat(ctx, p.every, nil, func(all []sample) error {
			for _, one := range v.each(all) {
				if err := a.line(one); err != nil {
					return err
				}
			}
			return nil
		})
	}
	out := openScreen(f, v.whole)
	defer out.close()
	typed, restore := a.keys()
	defer restore()
	return s.repeat(ctx, p.every, typed, func(all []sample) error {
		out.draw(func(size client.PTYSize) []string { return v.lines(all, int(size.Cols), inColour(a.Out)) })
		return nil
	})
}

func (a *invocation) watchOnce(ctx context.Context, s *sampler, v view) error {
	all, err := s.measure(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.print(v.value(all), nil)
	}
	for _, line := range v.lines(all, 0, inColour(a.Out)) {
		fmt.Fprintln(a.Out, line)
	}
	return nil
}

// repeat shows what sandboxes use again and again: until somebody quits, or until those that were asked for have ended.
func (s *sampler) repeat(ctx context.Context, every time.Duration, typed <-chan byte, show func([]sample) error) error {
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	tick := time.NewTicker(every)
	defer tick.Stop()
	all, err := s.measure(ctx)
	for {
		if err == nil {
			err = show(all)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case len(s.ids) > 0 && !slices.ContainsFunc(all, func(x sample) bool { return x.State != "ended" }):
			return nil
		}
		select {
		case <-tick.C:
			all, err = s.measure(ctx)
		case <-resized:
		case k := <-typed:
			if k == 'q' || k == 'Q' || k == 'c'&0x1f {
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func (a *invocation) stats() *cobra.Command {
	var p pace
	c := &cobra.Command{
		Use:   "stats [ID...]",
		Short: "Show what sandboxes use, live",
		Long: "Show processor, memory, processes and disk of your living sandboxes, or of those named: on a terminal a table that is\n" +
			"drawn again in its place until q or Ctrl-C, elsewhere one table, with --json an object a line for each sandbox and\n" +
			"moment. CPU % is of one CPU. To look does not count as use of a sandbox.",
		Example:           "  cove stats\n  cove stats --no-stream --json | jq '.[] | select(.memory_bytes > 5e8)'",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: a.completeIDs(0, living...),
		RunE: func(c *cobra.Command, names []string) error {
			cl, err := a.connect(c.Context())
			if err != nil {
				return err
			}
			s := &sampler{c: cl}
			for _, name := range names {
				sb, err := a.find(c.Context(), cl, name)
				if err != nil {
					return err
				}
				s.ids = append(s.ids, sb.ID)
			}
			return a.watch(c.Context(), s, p, view{value: func(all []sample) any { return all }, each: eachSample, lines: statsLines})
		},
	}
	p.register(c)
	return c
}

func eachSample(all []sample) []any {
	values := make([]any, len(all))
	for i, x := range all {
		values[i] = x
	}
	return values
}

func statsLines(all []sample, width int, colour bool) []string {
	var t table
	t.head("ID", "STATE", ">CPU %", ">MEMORY / LIMIT", ">MEM %", ">PIDS", ">DISK / LIMIT", "KEY")
	for _, x := range all {
		t.row(x.ID, stateCell(x.State), cpuCell(x.CPUPercent), ofLimit(x.MemoryBytes, x.MemoryLimitBytes), memoryCell(x),
			pidsText(x), ofLimit(x.DiskBytes, x.DiskLimitBytes), cmp.Or(x.Key, "-"))
	}
	lines := t.lines(width, colour)
	if len(all) == 0 {
		lines = append(lines, "no sandbox is living; `cove create` makes one")
	}
	return lines
}

func cpuCell(percent float64) cell {
	c := cell{text: fmt.Sprintf("%.1f", percent)}
	if percent >= 80 {
		c.style = yellow
	}
	return c
}

func memoryCell(x sample) cell {
	if x.MemoryLimitBytes == 0 {
		return cell{text: "-"}
	}
	percent := float64(x.MemoryBytes) / float64(x.MemoryLimitBytes) * 100
	c := cell{text: fmt.Sprintf("%.1f", percent)}
	if percent >= 90 {
		c.style = red
	}
	return c
}

func pidsText(x sample) string {
	if x.PidsLimit == 0 {
		return strconv.Itoa(x.Pids)
	}
	return fmt.Sprintf("%d / %d", x.Pids, x.PidsLimit)
}

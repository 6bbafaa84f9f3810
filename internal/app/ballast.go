package app

import (
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

// ballast is a file that holds space for the database: when the disk is full the server removes it,
// so that it can record what ends. It is made again when there is space.
type ballast struct {
	dir  string
	log  *slog.Logger
	rest time.Time // after a failure it is not made before then
	told bool      // the failure is in the log
	stop chan struct{}
	done chan struct{}
}

const (
	ballastName  = "reserve"
	ballastBytes = 16 << 20
	ballastLow   = ballastBytes / 4 // free bytes below which it is removed
	ballastEvery = time.Second
	ballastRest  = time.Minute // after a failure, which on some file systems is the only answer
)

// keepBallast looks after the file until close. Without space for it at the start the server starts
// all the same.
func keepBallast(dir string, log *slog.Logger) *ballast {
	b := &ballast{dir: dir, log: log, stop: make(chan struct{}), done: make(chan struct{})}
	b.adjust()
	go b.run()
	return b
}

func (b *ballast) close() error {
	close(b.stop)
	<-b.done
	return nil
}

func (b *ballast) run() {
	defer close(b.done)
	tick := time.NewTicker(ballastEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			b.adjust()
		case <-b.stop:
			return
		}
	}
}

// adjust removes the file when the disk is full, and makes it when there is much more space than it
// takes.
func (b *ballast) adjust() {
	free, ok := diskFree(b.dir)
	path := filepath.Join(b.dir, ballastName)
	switch {
	case !ok:
	case free < ballastLow:
		if os.Remove(path) == nil {
			b.log.Warn("the disk is full: the server uses the space that it keeps for its database", "file", path, "bytes", ballastBytes)
		}
	case free > 4*ballastBytes && time.Now().After(b.rest):
		if info, err := os.Lstat(path); err == nil && info.Size() == ballastBytes {
			return
		}
		err := takeSpace(path, ballastBytes)
		if err != nil {
			_ = os.Remove(path) // half of it would never be completed
			b.rest = time.Now().Add(ballastRest)
			if !b.told {
				b.log.Warn("no space is kept for the database", "file", path, "error", err)
			}
		}
		b.told = err != nil
	}
}

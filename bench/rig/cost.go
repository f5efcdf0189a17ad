package rig

import (
	"context"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	walWritten = pg.Define(pg.RoleOwner, "rig.wal_written", `
		SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS bytes, w.wal_fpi AS pages FROM pg_stat_wal w`)
	serverPIDs = pg.Define(pg.RoleOwner, "rig.server_pids", `SELECT pid, application_name AS name FROM pg_stat_activity`)
)

// cost is the resources used until a moment, or between two.
type cost struct {
	cpu   time.Duration
	wal   int64
	pages int64                           // full-page images in the write-ahead log
	of    map[serverProcess]time.Duration // processor time by process of the database
	own   time.Duration                   // of this process
	by    map[string]time.Duration        // processor time of the database's sessions, by application
}

// serverProcess is a process of the database.
type serverProcess struct {
	PID  int32  `db:"pid"`
	Name string `db:"name"` // of its application
}

// written is the position of the write-ahead log.
type written struct {
	Bytes int64 `db:"bytes"`
	Pages int64 `db:"pages"`
}

// cost returns the resources that this process and the database have used. A process of the database that /proc does
// not list here counts nothing.
func (r *Rig) cost(ctx context.Context) (cost, error) {
	c := cost{of: map[serverProcess]time.Duration{}}
	var err error
	if c.wal, c.pages, err = r.Written(ctx); err != nil {
		return c, err
	}
	processes, err := pg.All[serverProcess](ctx, r.Owner, serverPIDs)
	if err != nil {
		return c, fmt.Errorf("read the database's processes: %w", err)
	}
	for _, p := range processes {
		c.of[p] = ProcessorTime(p.PID)
	}
	c.own, err = OwnTime()
	return c, err
}

// OwnTime returns the processor time of this process.
func OwnTime() (time.Duration, error) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0, fmt.Errorf("read processor time: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), nil
}

// spend adds the cost of a stretch.
func (r *Rig) spend(ctx context.Context, c *cost, stretch func(context.Context) error) error {
	from, err := r.cost(ctx)
	if err != nil {
		return err
	}
	if err := stretch(ctx); err != nil {
		return err
	}
	to, err := r.cost(ctx)
	if err != nil {
		return err
	}
	c.add(from, to)
	return nil
}

// add adds the resources used between two moments.
func (c *cost) add(from, to cost) {
	c.wal += to.wal - from.wal
	c.pages += to.pages - from.pages
	c.own += to.own - from.own
	c.cpu += to.own - from.own
	if c.by == nil {
		c.by = map[string]time.Duration{}
	}
	for p, at := range to.of {
		c.cpu += at - from.of[p]
		c.by[p.Name] += at - from.of[p]
	}
}

// Written returns how many bytes of the write-ahead log the server has written, and how many full-page images are among
// them.
func (r *Rig) Written(ctx context.Context) (int64, int64, error) {
	log, err := pg.One[written](ctx, r.Owner, walWritten)
	if err != nil {
		return 0, 0, fmt.Errorf("read the write-ahead log's length: %w", err)
	}
	return log.Bytes, log.Pages, nil
}

// ProcessorTime returns the processor time of a process, by /proc; zero if it is not there.
func ProcessorTime(pid int32) time.Duration {
	return processorTimes(int(pid)).own
}

// ServerTime returns the processor time of a database server: the postmaster, its children, and those of its children
// that have ended.
func ServerTime(postmaster int) time.Duration {
	server := processorTimes(postmaster)
	total := server.own + server.ended
	all, err := os.ReadDir("/proc")
	if err != nil {
		return total
	}
	for _, entry := range all {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if child := processorTimes(pid); child.parent == postmaster {
			total += child.own
		}
	}
	return total
}

// times is the processor time of a process and of its ended children, with its parent.
type times struct {
	own, ended time.Duration
	parent     int
}

// processorTimes reads the times of a process (proc(5), stat); zeros if it is not there.
func processorTimes(pid int) times {
	const tick = time.Second / 100 // USER_HZ
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return times{}
	}
	_, rest, _ := strings.Cut(string(raw), ") ") // behind the name, which may hold spaces
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return times{}
	}
	number := func(i int) int64 {
		n, _ := strconv.ParseInt(fields[i], 10, 64)
		return n
	}
	return times{
		own: time.Duration(number(11)+number(12)) * tick, ended: time.Duration(number(13)+number(14)) * tick,
		parent: int(number(1)),
	}
}

// Spent is the cost of a stretch: processor time of this process, of the database's sessions and of other processes,
// and bytes of the write-ahead log.
type Spent struct {
	Processor time.Duration
	WAL       int64
}

// Spend returns the cost of a stretch, with the processes beside this one and the database's that take part in it.
func (r *Rig) Spend(ctx context.Context, processes []int, stretch func(context.Context) error) (Spent, error) {
	beside := func() time.Duration {
		var total time.Duration
		for _, pid := range processes {
			total += ProcessorTime(int32(pid)) // a process id
		}
		return total
	}
	var c cost
	before := beside()
	err := r.spend(ctx, &c, stretch)
	return Spent{Processor: c.cpu + beside() - before, WAL: c.wal}, err
}

// SpendSessions returns the cost of a stretch in this process and in the sessions of replicas: background work of the
// database, such as a checkpoint, is not in it.
//
//nolint:nonamedreturns // two of one type
func (r *Rig) SpendSessions(
	ctx context.Context, stretch func(context.Context) error,
) (own, sessions time.Duration, wal int64, err error) {
	var c cost
	err = r.spend(ctx, &c, stretch)
	return c.own, c.by[LifecycleSessions] + c.by[SequencerSessions], c.wal, err
}

// Of returns milliseconds of processor time and bytes of the write-ahead log a unit.
func (s Spent) Of(units int) (float64, float64) {
	n := float64(max(units, 1))
	return math.Round(1e6*s.Processor.Seconds()/n) / 1000, math.Round(float64(s.WAL) / n)
}

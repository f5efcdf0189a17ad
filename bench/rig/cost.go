package rig

import (
	"context"
	"fmt"
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

// cost is what has been spent until a moment, or between two.
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

// written is how far the write-ahead log has come.
type written struct {
	Bytes int64 `db:"bytes"`
	Pages int64 `db:"pages"`
}

// cost returns what this process and the database have spent. A process of the database that is not seen from here counts nothing.
func (r *Rig) cost(ctx context.Context) (cost, error) {
	c := cost{of: map[serverProcess]time.Duration{}}
	log, err := pg.One[written](ctx, r.Owner, walWritten)
	if err != nil {
		return c, fmt.Errorf("read the write-ahead log's length: %w", err)
	}
	c.wal, c.pages = log.Bytes, log.Pages
	processes, err := pg.All[serverProcess](ctx, r.Owner, serverPIDs)
	if err != nil {
		return c, fmt.Errorf("read the database's processes: %w", err)
	}
	for _, p := range processes {
		c.of[p] = ProcessorTime(p.PID)
	}
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return c, fmt.Errorf("read processor time: %w", err)
	}
	c.own = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	return c, nil
}

// add adds what was spent between two moments.
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

// ProcessorTime returns how long a process has run, by /proc; zero if it is not there.
func ProcessorTime(pid int32) time.Duration {
	const tick = time.Second / 100 // USER_HZ
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/stat")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(raw), ") ") // behind the name, which may hold spaces
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(fields[11], 10, 64)
	system, _ := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * tick
}

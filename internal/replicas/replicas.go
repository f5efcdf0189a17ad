// Package replicas records which replicas of nodeapi listen to agents, in mesh.replica: one row for each replica, which
// only its own service writes and every service reads. A beat is one statement by the database's clock, and appends no
// event: a service that depends on beats reads the table.
package replicas

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// Every is the cadence of beats.
	Every = 5 * time.Second
	// SilentAfter is how long a replica may be silent before its sessions count as gone. A beat that is not written within
	// the cadence, by its own time limit, is followed by the next one at once, which leaves two seconds for that.
	SilentAfter = 2*Every + 2*time.Second
	// silent is SilentAfter in SQL.
	silent = "12 seconds"
	// gap is the time without any beat after which listening begins anew: four of the cadence.
	gap = "20 seconds"
	// Crowding excuses silence for crowdedFor from its beginning, once in crowdedEvery: connections that any client can
	// make crowd a replica too, and a node that is down must not stay hidden behind them.
	crowdedFor   = "10 minutes"
	crowdedEvery = "1 hour"
	// keptFor is how long the row of a replica that is gone is kept: as long as an operator may want to see since when its
	// nodes have been silent.
	keptFor = "7 days"
)

// Beat is what a replica writes about itself.
type Beat struct {
	ReplicaID      string
	Address        string // host:port at which other services reach it
	Sessions, Late int    // sessions at this replica, and those of them that are late
	Leaving        bool
	// Crowded is whether agents were turned away, or had to wait for openings before theirs, since the beat before.
	Crowded bool
}

// Written is a beat as it was written.
type Written struct {
	StartedAt time.Time `db:"started_at"`
	BeatAt    time.Time `db:"beat_at"`
	Version   int64     `db:"version"`
}

var (
	// An existing row is updated directly: ON CONFLICT would lock it first, and write the lock to the write-ahead log too.
	// Listening began when the oldest of the chain of overlapping replicas began: a replica takes that time over from the
	// replicas with a recent beat.
	write = pg.Define(pg.RoleNodeAPI, "replicas.beat", `
		WITH c AS MATERIALIZED (SELECT mesh.clock() AS now),
		chain AS MATERIALIZED (
			SELECT COALESCE((
					SELECT min(o.listening_since) FROM mesh.replica o
						WHERE o.service = current_user AND o.beat_at > c.now - interval '`+gap+`'
				), c.now) AS since FROM c
		), kept AS (
			UPDATE mesh.replica r SET address = $2, beat_at = c.now, listening_since = chain.since,
				sessions = $3, late = $4, leaving = $5, version = r.version + 1,
				crowded_at = CASE WHEN $6 THEN c.now ELSE r.crowded_at END,
				crowded_since = CASE WHEN $6 AND (r.crowded_since IS NULL OR
					r.crowded_since <= c.now - interval '`+crowdedEvery+`') THEN c.now ELSE r.crowded_since END
			FROM c, chain WHERE r.replica_id = $1 RETURNING `+pg.Columns[Written]("r")+`
		), made AS (
			INSERT INTO mesh.replica AS r (service, replica_id, address, started_at, beat_at, listening_since, sessions, late,
				leaving, version, crowded_at, crowded_since)
			SELECT current_user, $1, $2, c.now, c.now, chain.since, $3, $4, $5, 1, CASE WHEN $6 THEN c.now END,
				CASE WHEN $6 THEN c.now END
			FROM c, chain WHERE NOT EXISTS (SELECT FROM kept)
			ON CONFLICT (replica_id) DO UPDATE
			SET address = excluded.address, beat_at = excluded.beat_at, listening_since = excluded.listening_since,
				sessions = excluded.sessions, late = excluded.late, leaving = excluded.leaving, version = r.version + 1
			RETURNING `+pg.Columns[Written]("r")+`
		)
		SELECT k.started_at, k.beat_at, k.version FROM kept k
		UNION ALL
		SELECT m.started_at, m.beat_at, m.version FROM made m`)

	forget = pg.Define(pg.RoleNodeAPI, "replicas.forget", `
		DELETE FROM mesh.replica r WHERE r.service = current_user AND r.beat_at < mesh.clock() - interval '`+keptFor+`'`)
)

// Write writes a beat.
func Write(ctx context.Context, q pg.Querier, b Beat) (Written, error) {
	w, err := pg.One[Written](ctx, q, write, b.ReplicaID, b.Address, b.Sessions, b.Late, b.Leaving, b.Crowded)
	if err != nil {
		return Written{}, fmt.Errorf("write beat: %w", err)
	}
	return w, nil
}

// Forget deletes the rows of replicas that have been gone for a week.
func Forget(ctx context.Context, q pg.Querier) error {
	if _, err := pg.Exec(ctx, q, forget); err != nil {
		return fmt.Errorf("forget replicas: %w", err)
	}
	return nil
}

// Lives returns the condition, over a row of mesh.replica, that the replica has a recent beat.
func Lives(row string) string {
	return row + `.service = 'nodeapi' AND ` + row + `.beat_at > mesh.clock() - interval '` + silent + `'`
}

// ListeningSince returns the expression since when replicas of nodeapi have listened, to every agent, without a gap;
// NULL: none does. While a replica is crowded, its agents are not heard for a reason that is ours: listening begins
// when that is over.
func ListeningSince() string {
	return `(SELECT greatest((array_agg(l.listening_since ORDER BY l.beat_at DESC))[1],
		max(least(l.crowded_at, l.crowded_since + interval '` + crowdedFor + `')))
		FROM mesh.replica l WHERE ` + Listens("l") + `)`
}

// Listens returns the condition, over a row of mesh.replica, that agents can have a session there: it lives, and is not
// about to leave.
func Listens(row string) string { return Lives(row) + ` AND NOT ` + row + `.leaving` }

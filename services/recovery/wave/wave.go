package wave

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

// Window is how long a node counts after it was last seen without a record.
const Window = 5 * time.Minute

// mostNamed bounds the nodes that Describe names.
const mostNamed = 32

// waveLock is the lock under which transactions count suspects one after another.
const waveLock = 0x67707561_0060

// Limits bound how many nodes may be refused within the window.
type Limits struct {
	Fraction float64 // of the active nodes
	Least    int     // in any fleet
}

// LimitsOf returns the limits of a policy; nil: those of the defaults.
func LimitsOf(reader policy.Reader) Limits {
	set := policy.Defaults()
	if reader != nil {
		set = reader.Current()
	}
	return Limits{Fraction: set.BrakeIdentityFraction(), Least: set.BrakeIdentityLeast()}
}

// Suspect is a node that would be refused because a record is missing.
type Suspect struct {
	NodeID string
	Reason commonv1.Reason
}

// State is a wave as it stands.
type State struct {
	Engaged  bool  `db:"engaged"`  // the fleet brake
	Suspects int32 `db:"suspects"` // within the window, and not recorded before a person's release of the brake
	// Fleet is the number of active nodes as far as it matters: it is exact if the suspects are above the share of them,
	// and else at least so large that they are not. It is not counted while the suspects are at most the least number.
	Fleet int32 `db:"fleet"`
}

// Most returns the number of suspects above which there is a wave.
func (l Limits) Most(fleet int32) int32 {
	return max(int32(l.Fraction*float64(fleet)+1e-9), int32(min(l.Least, math.MaxInt32)))
}

// Over reports whether there are more suspects than the limits allow.
func (s State) Over(l Limits) bool { return s.Suspects > l.Most(s.Fleet) }

// braked reports whether suspects wait.
func (s State) braked(l Limits) bool { return s.Engaged || s.Over(l) }

// group is the suspects of one reason.
type group struct {
	Reason string   `db:"reason"`
	Count  int32    `db:"count"`
	Nodes  []string `db:"nodes"`
}

var (
	takeLock = pg.Define(pg.RoleRecovery, "wave.take_lock", `SELECT pg_advisory_xact_lock($1)`)

	noteSuspects = pg.Define(pg.RoleRecovery, "wave.note_suspects", `
		INSERT INTO recovery.suspect AS s (node_id, reason, first_at, last_at)
		SELECT DISTINCT ON (n.node_id) n.node_id, n.reason, mesh.clock(), mesh.clock()
			FROM unnest($1::uuid[], $2::text[]) AS n (node_id, reason)
		ORDER BY n.node_id
		ON CONFLICT (node_id) DO UPDATE SET reason = excluded.reason, last_at = excluded.last_at, times = s.times + 1,
			first_at = CASE WHEN s.last_at <= excluded.last_at - make_interval(secs => $3) THEN excluded.first_at ELSE s.first_at
				END`)

	// The active nodes are counted only if their number can decide, and only up to the number at which it does.
	readState = pg.Define(pg.RoleRecovery, "wave.read_state", `
		SELECT b.engaged, s.suspects, CASE WHEN s.suspects <= $2 THEN 0 ELSE (SELECT count(*)::int FROM (
			SELECT FROM recovery.identity i WHERE i.state = 'active' LIMIT ceil((s.suspects + 1) / $3::float8)::bigint) f)
				END AS fleet
		FROM recovery.brake b CROSS JOIN LATERAL (SELECT count(*)::int AS suspects FROM recovery.suspect x
			WHERE x.last_at > mesh.clock() - make_interval(secs => $1) AND x.first_at > COALESCE(b.released_at, '-infinity')) s`)

	readGroups = pg.Define(pg.RoleRecovery, "wave.read_groups", `
		SELECT x.reason, count(*)::int AS count, (array_agg(x.node_id::text ORDER BY x.first_at, x.node_id))[1:$2] AS nodes
		FROM recovery.suspect x, recovery.brake b
		WHERE x.last_at > mesh.clock() - make_interval(secs => $1) AND x.first_at > COALESCE(b.released_at, '-infinity')
		GROUP BY x.reason ORDER BY count(*) DESC, x.reason`)

	readEngaged = pg.Define(pg.RoleRecovery, "wave.read_engaged", `SELECT b.engaged FROM recovery.brake b`)

	// Rows that another transaction is recording again are skipped.
	forgetSuspects = pg.Define(pg.RoleRecovery, "wave.forget_suspects", `
		DELETE FROM recovery.suspect WHERE node_id IN (
			SELECT x.node_id FROM recovery.suspect x WHERE x.last_at < mesh.clock() - interval '1 hour'
			ORDER BY x.last_at LIMIT 10000 FOR UPDATE SKIP LOCKED)`)
)

// Record records suspects and reports whether they must be told to wait in place of being refused. The caller must
// already have the locks on the rows that the suspects are about; the lock that Record takes comes after those and
// after rollback's, and before that of the authority view.
func Record(ctx context.Context, tx pgx.Tx, limits Limits, suspects []Suspect) (bool, error) {
	if len(suspects) == 0 {
		return false, nil
	}
	nodes, reasons := make([]string, len(suspects)), make([]string, len(suspects))
	for i, s := range suspects {
		nodes[i], reasons[i] = s.NodeID, names.Of(s.Reason)
	}
	if _, err := pg.Exec(ctx, tx, takeLock, int64(waveLock)); err != nil {
		return false, fmt.Errorf("take lock of suspects: %w", err)
	}
	// The statements after the lock see what the last holder of the lock committed.
	if _, err := pg.Exec(ctx, tx, noteSuspects, nodes, reasons, Window.Seconds()); err != nil {
		return false, fmt.Errorf("note suspects: %w", err)
	}
	s, err := Read(ctx, tx, limits)
	if err != nil {
		return false, err
	}
	return s.braked(limits), nil
}

// Read returns the wave as it stands.
func Read(ctx context.Context, q pg.Querier, limits Limits) (State, error) {
	s, err := pg.One[State](ctx, q, readState, Window.Seconds(), limits.Least, limits.Fraction)
	if err != nil {
		return State{}, fmt.Errorf("count suspects: %w", err)
	}
	return s, nil
}

// Describe returns the number of suspects by reason as text, such as "serial_unknown 180, identity_unknown 20", and the
// ids of some of them.
func Describe(ctx context.Context, q pg.Querier) (string, []string, error) {
	groups, err := pg.All[group](ctx, q, readGroups, Window.Seconds(), mostNamed)
	if err != nil {
		return "", nil, fmt.Errorf("read suspects: %w", err)
	}
	words, nodes := make([]string, len(groups)), []string{}
	for i, g := range groups {
		words[i] = fmt.Sprintf("%s %d", g.Reason, g.Count)
		nodes = append(nodes, g.Nodes...)
	}
	nodes = nodes[:min(len(nodes), mostNamed)]
	slices.Sort(nodes)
	return strings.Join(words, ", "), nodes, nil
}

// Forget deletes suspects that were not seen for an hour.
func Forget(ctx context.Context, tx pgx.Tx) error {
	if _, err := pg.Exec(ctx, tx, forgetSuspects); err != nil {
		return fmt.Errorf("forget suspects: %w", err)
	}
	return nil
}

// Refusal returns the fault that makes a node wait.
func Refusal(cause error) *fault.Error {
	return fault.New(commonv1.Reason_REASON_RECORDS_MISSING, "", fault.Cause(cause))
}

// ofMissingRecord reports whether a refusal follows from a missing record. If the refusal was softened already, the
// softened reason counts, and not its cause.
func ofMissingRecord(err error) bool {
	reason := fault.ReasonOf(err)
	return reason == commonv1.Reason_REASON_SERIAL_UNKNOWN || reason == commonv1.Reason_REASON_IDENTITY_UNKNOWN
}

// Refuse records a node that is refused with an error because a record is missing, and returns the error to send: the
// same error, or Refusal if the node must wait. Other errors are returned unchanged.
func Refuse(ctx context.Context, pool *pgxpool.Pool, limits Limits, nodeID string, err error) error {
	if !ofMissingRecord(err) {
		return err
	}
	var braked bool
	failed := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var err2 error
		braked, err2 = Record(ctx, tx, limits, []Suspect{{NodeID: nodeID, Reason: fault.ReasonOf(err)}})
		return err2
	})
	switch {
	case failed != nil:
		return fmt.Errorf("note suspect: %w", failed)
	case braked:
		return Refusal(err)
	}
	return err
}

// Soften returns the error for a caller that has proved nothing: while the brake is engaged, a caller whose token is
// unknown is told to wait. Such a caller is not counted, since any client may send an unknown token.
func Soften(ctx context.Context, q pg.Querier, err error) error {
	if !ofMissingRecord(err) && fault.ReasonOf(err) != commonv1.Reason_REASON_TOKEN_INVALID {
		return err
	}
	engaged, failed := pg.Value[bool](ctx, q, readEngaged)
	switch {
	case failed != nil:
		return fmt.Errorf("read whether the brake is engaged: %w", failed)
	case engaged:
		return Refusal(err)
	}
	return err
}

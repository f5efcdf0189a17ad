package tokens

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// creditSQL returns the seconds since a time in which we issued nothing. Stops that overlap count once.
func creditSQL(since string) string {
	return `COALESCE((SELECT sum(extract(epoch FROM upper(r) - lower(r))) FROM unnest((
		SELECT range_agg(tstzrange(GREATEST(s.from_at, ` + since + `), GREATEST(s.from_at, ` + since + `,
			LEAST(COALESCE(s.until_at, mesh.clock()), mesh.clock())))) FROM recovery.issuance_stop s
		WHERE s.until_at IS NULL OR s.until_at > ` + since + `)) r), 0)::float8`
}

// extendedSQL returns until when the newest extension of a profile accepts its tokens; null without one.
func extendedSQL(profile string) string {
	return `(SELECT e.until_at FROM recovery.token_extension e WHERE e.profile = ` + profile + `
		ORDER BY e.decided_at DESC LIMIT 1)`
}

// Weights are what a token's age is judged by.
type Weights struct {
	Now      time.Time  `db:"now"`
	Credit   float64    `db:"credit"`   // seconds that do not age it
	Extended *time.Time `db:"extended"` // its profile's tokens are good until then
}

var weigh = pg.Define(pg.RoleRecovery, "tokens.weigh", `
	SELECT mesh.clock() AS now, `+creditSQL("$1::timestamptz")+` AS credit, `+extendedSQL("$2::text")+` AS extended`)

// Weigh returns the weights of a token. It reads the stops since the token counts, and one extension.
func Weigh(ctx context.Context, q pg.Querier, r *Row) (Weights, error) {
	w, err := pg.One[Weights](ctx, q, weigh, r.Since(), r.Profile)
	if err != nil {
		return Weights{}, fmt.Errorf("weigh recovery token: %w", err)
	}
	return w, nil
}

// GoodUntil returns when a token that ages from a time is too old.
func (w Weights) GoodUntil(since time.Time, maxAge time.Duration) time.Time {
	until := since.Add(maxAge + time.Duration(w.Credit*float64(time.Second)))
	if w.Extended != nil && w.Extended.After(until) {
		return *w.Extended
	}
	return until
}

// readUsable finds the nodes by the index of their tokens.
var readUsable = pg.Define(pg.RoleRecovery, "tokens.read_usable", `
	SELECT DISTINCT t.node_id::text FROM recovery.recovery_token t
	WHERE t.node_id = ANY ($1::uuid[]) AND t.state = 'issued' AND (`+extendedSQL("t.profile")+` > mesh.clock()
		OR COALESCE(t.counted_since, t.issued_at) + make_interval(secs => $2::float8 + `+
	creditSQL("COALESCE(t.counted_since, t.issued_at)")+`) > mesh.clock())`)

// Usable returns those of the nodes that have a token which counts and is not too old now.
func Usable(ctx context.Context, q pg.Querier, nodeIDs []string, maxAge time.Duration) ([]string, error) {
	list, err := pg.Values[string](ctx, q, readUsable, nodeIDs, maxAge.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read nodes with a usable recovery token: %w", err)
	}
	return list, nil
}

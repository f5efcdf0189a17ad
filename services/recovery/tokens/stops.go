package tokens

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
)

const (
	// stopOutage is the reason of a stop in which no replica of nodeapi listened: nothing was renewed.
	stopOutage = "outage"
	// stopPreflight is the reason of a stop in which the ingress refused what the authority signs: nothing was issued.
	stopPreflight = "preflight"
	// stopAuthority is the reason of a stop in which the authority did not answer or did not sign.
	stopAuthority = "authority"
	// stopRecovery is the reason of a stop in which no replica of recovery ran: nothing was enrolled or renewed.
	stopRecovery = "recovery"
	// outageGap is the time without a beat from which on listening begins anew: what package replicas takes for a gap.
	outageGap = 20 * time.Second

	// authorityBound is for how long a stop of the authority goes on after the last check that has found it away. Builds
	// that do not know the reason end no such stop, and count one up to its end.
	authorityBound = 2 * time.Minute

	// awayGap is the time without a look from which on no replica of recovery ran: more than two looks that failed.
	awayGap = 35 * time.Second
)

// Stops records when we issued nothing because no replica of nodeapi listened, or none of recovery ran. Every replica
// of recovery runs it; it writes a stop when an outage of nodeapi begins and when it ends, and after one of recovery.
type Stops struct {
	pool   *pgxpool.Pool
	logger *slog.Logger
	seen   *time.Time // the last beat that was found at the last look; of Run alone
}

// NewStops checks the dependencies.
func NewStops(pool *pgxpool.Pool, logger *slog.Logger) (*Stops, error) {
	if pool == nil || logger == nil {
		return nil, errors.New("stops of issuance need a pool and a logger")
	}
	return &Stops{pool: pool, logger: logger}, nil
}

// Run looks at every other beat until ctx ends: times are those of the beats, whenever it looks.
func (s *Stops) Run(ctx context.Context) error {
	return app.Every(ctx, s.logger, "issuance-stops", 2*replicas.Every, s.RunOnce)
}

// heard is what the beats of nodeapi's replicas show.
type heard struct {
	BeatAt    *time.Time `db:"beat_at"`   // the last one of any
	Lives     bool       `db:"lives"`     // some replica has a recent beat
	Listening *time.Time `db:"listening"` // since when replicas listen; nil: none does
	Before    *time.Time `db:"before"`    // the last beat before they began to
	Lasting   bool       `db:"lasting"`   // an outage is recorded that has not ended
	Recorded  bool       `db:"recorded"`  // the outage that ended when they began to is recorded
	Away      *time.Time `db:"away"`      // the last look of any replica of recovery, if that was an outage ago
}

var (
	// It also notes the time of the look, as one of the replicas of recovery does within a beat ($2). Where the look
	// before was longer ago than $3 none of them ran meanwhile, which is a stop ($1).
	readBeats = pg.Define(pg.RoleRecovery, "tokens.read_beats", `
		WITH c AS MATERIALIZED (SELECT mesh.clock() AS now),
		former AS MATERIALIZED (
			-- A replica of a build before this table does not note its looks, but up to when it has judged.
			SELECT CASE WHEN k.looked_at IS NOT NULL THEN GREATEST(k.looked_at,
				(SELECT j.through FROM mesh.judged j WHERE j.service = 'recovery')) END AS looked_at
			FROM recovery.issuance_look k, c
			WHERE k.looked_at IS NULL OR k.looked_at < c.now - make_interval(secs => $2) FOR UPDATE OF k SKIP LOCKED
		), noted AS (
			UPDATE recovery.issuance_look SET looked_at = c.now FROM c WHERE EXISTS (SELECT FROM former)
		), away AS (
			INSERT INTO recovery.issuance_stop AS s (stop_id, reason, from_at, until_at)
			SELECT $1, '`+stopRecovery+`', f.looked_at, c.now FROM former f, c
			WHERE f.looked_at <= c.now - make_interval(secs => $3)
			ON CONFLICT (until_at, reason) DO NOTHING RETURNING s.from_at
		), l AS (SELECT max(r.listening_since) AS since FROM mesh.replica r WHERE `+replicas.Listens("r")+`)
		SELECT (SELECT a.from_at FROM away a) AS away,
			(SELECT max(r.beat_at) FROM mesh.replica r WHERE r.service = 'nodeapi') AS beat_at,
			EXISTS (SELECT FROM mesh.replica r WHERE `+replicas.Lives("r")+`) AS lives, l.since AS listening,
			(SELECT max(r.beat_at) FROM mesh.replica r WHERE r.service = 'nodeapi' AND r.beat_at < l.since) AS before,
			EXISTS (SELECT FROM recovery.issuance_stop s WHERE s.reason = 'outage' AND s.until_at IS NULL) AS lasting,
			EXISTS (SELECT FROM recovery.issuance_stop s WHERE s.reason = 'outage' AND s.until_at >= l.since) AS recorded
		FROM l`)

	// Replicas of recovery that see the same begin or end write one row.
	beginStop = pg.Define(pg.RoleRecovery, "tokens.begin_stop", `
		INSERT INTO recovery.issuance_stop (stop_id, reason, from_at) VALUES ($1, $2, $3)
		ON CONFLICT (reason) WHERE until_at IS NULL DO NOTHING`)

	endStop = pg.Define(pg.RoleRecovery, "tokens.end_stop", `
		UPDATE recovery.issuance_stop SET until_at = GREATEST(from_at, $2) WHERE reason = $1 AND until_at IS NULL`)

	// A stop that goes on at the check, or that a build which set no end has begun, is continued; else another begins.
	continueStop = pg.Define(pg.RoleRecovery, "tokens.continue_stop", `
		WITH going AS (
			UPDATE recovery.issuance_stop SET until_at = mesh.clock() + make_interval(secs => $4)
			WHERE stop_id = (SELECT s.stop_id FROM recovery.issuance_stop s
				WHERE s.reason = $2 AND (s.until_at IS NULL OR s.until_at > $3)
				ORDER BY s.until_at DESC NULLS FIRST, s.stop_id LIMIT 1)
			RETURNING stop_id
		)
		INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at)
		SELECT $1, $2, $3, mesh.clock() + make_interval(secs => $4) WHERE NOT EXISTS (SELECT FROM going)`)

	endContinued = pg.Define(pg.RoleRecovery, "tokens.end_continued_stop", `
		UPDATE recovery.issuance_stop SET until_at = GREATEST(from_at, $2)
		WHERE stop_id = (SELECT s.stop_id FROM recovery.issuance_stop s
			WHERE s.reason = $1 AND (s.until_at IS NULL OR s.until_at > $2)
			ORDER BY s.until_at DESC NULLS FIRST, s.stop_id LIMIT 1)`)

	recordStop = pg.Define(pg.RoleRecovery, "tokens.record_stop", `
		INSERT INTO recovery.issuance_stop AS s (stop_id, reason, from_at, until_at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (until_at, reason) DO NOTHING`)
)

// RunOnce looks once. An outage that no replica of recovery saw is known by the beats before it, or by what this
// process found at its last look.
func (s *Stops) RunOnce(ctx context.Context) error {
	h, err := pg.One[heard](ctx, s.pool, readBeats, ids.New(), replicas.Every.Seconds(), awayGap.Seconds())
	if err != nil {
		return fmt.Errorf("look at beats: %w", err)
	}
	if h.Away != nil {
		s.logger.WarnContext(ctx, "no replica of recovery ran: recovery tokens did not age", slog.Time("since", *h.Away))
	}
	last := s.seen
	s.seen = h.BeatAt
	switch {
	case !h.Lives && h.BeatAt != nil && !h.Lasting:
		_, err = pg.Exec(ctx, s.pool, beginStop, ids.New(), stopOutage, *h.BeatAt)
		s.logger.WarnContext(ctx, "no replica of nodeapi beats: recovery tokens do not age", slog.Time("since", *h.BeatAt))
	case h.Listening == nil:
	case h.Lasting:
		_, err = pg.Exec(ctx, s.pool, endStop, stopOutage, *h.Listening)
	case !h.Recorded:
		from := later(last, h.Before, *h.Listening)
		if from == nil || h.Listening.Sub(*from) < outageGap {
			return nil
		}
		_, err = pg.Exec(ctx, s.pool, recordStop, ids.New(), stopOutage, *from, *h.Listening)
	}
	if err != nil {
		return fmt.Errorf("record stop of issuance: %w", err)
	}
	return nil
}

// Untrusted records, in the transaction that finds it, that nothing is issued from a time on because the ingress
// refuses what the authority signs; with until set, that this is over.
func Untrusted(ctx context.Context, tx pgx.Tx, from, until time.Time) error {
	_, err := pg.Exec(ctx, tx, beginStop, ids.New(), stopPreflight, from)
	if err == nil && !until.IsZero() {
		_, err = pg.Exec(ctx, tx, endStop, stopPreflight, until)
	}
	if err != nil {
		return fmt.Errorf("record stop of issuance: %w", err)
	}
	return nil
}

// Unanswered records, in the transaction that finds it, that nothing is issued from a time on because the authority
// does not answer or does not sign; with until set, that this is over. It is called again while that lasts: a stop that
// is not continued within authorityBound ends by itself.
func Unanswered(ctx context.Context, tx pgx.Tx, from, until time.Time) error {
	var err error
	if until.IsZero() {
		_, err = pg.Exec(ctx, tx, continueStop, ids.New(), stopAuthority, from, authorityBound.Seconds())
	} else {
		_, err = pg.Exec(ctx, tx, endContinued, stopAuthority, until)
	}
	if err != nil {
		return fmt.Errorf("record stop of issuance: %w", err)
	}
	return nil
}

// later returns the later of two times that are before a third; nil if neither is.
func later(a, b *time.Time, before time.Time) *time.Time {
	var out *time.Time
	for _, at := range []*time.Time{a, b} {
		if at != nil && at.Before(before) && (out == nil || at.After(*out)) {
			out = at
		}
	}
	return out
}

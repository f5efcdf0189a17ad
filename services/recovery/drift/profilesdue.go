package drift

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// dueRow is a version that has changed and whose nodes are not all due yet.
type dueRow struct {
	Fingerprint string    `db:"fingerprint"`
	Valid       bool      `db:"valid"`
	After       string    `db:"after_node" expr:"@.after_node::text"`
	Since       time.Time `db:"since"`
}

// pageRow is what one page of the nodes of a version has: how many, and the last of them.
type pageRow struct {
	Nodes int    `db:"nodes"`
	Last  string `db:"last"`
}

// spreadLock is the lock under which one replica makes nodes due for their profile.
const spreadLock = 0x67707561_0400

// spreadAgain is when a replica looks again that has found another one making nodes due.
const spreadAgain = 100 * time.Millisecond

var (
	noteProfilesDue = pg.Define(pg.RoleRecovery, "drift.note_profiles_due", `
		INSERT INTO recovery.profile_due AS d (fingerprint, valid)
		SELECT c.fingerprint, bool_and(c.valid) FROM unnest($1::text[], $2::boolean[]) AS c (fingerprint, valid)
		GROUP BY c.fingerprint ORDER BY c.fingerprint
		ON CONFLICT (fingerprint) DO UPDATE SET valid = d.valid AND EXCLUDED.valid, since = mesh.clock(),
			after_node = '00000000-0000-0000-0000-000000000000'`)

	// takeSpread waits for no other replica, and is released as the transaction ends.
	takeSpread = pg.Define(pg.RoleRecovery, "drift.take_spread", `SELECT pg_try_advisory_xact_lock($1)`)

	readProfileDue = pg.Define(pg.RoleRecovery, "drift.read_profile_due", `
		SELECT `+pg.Columns[dueRow]("d")+` FROM recovery.profile_due d ORDER BY d.since, d.fingerprint LIMIT 1`)

	// dueReporting makes a page of the nodes due that report a version; of one that is valid those alone of which that was
	// not so before.
	dueReporting = pg.Define(pg.RoleRecovery, "drift.due_reporting", `
		WITH page AS MATERIALIZED (
			SELECT n.node_id FROM recovery.node_profile n
			WHERE n.fingerprint = $1 AND n.node_id > $3 ORDER BY n.node_id LIMIT $4
		), concerned AS MATERIALIZED (
			SELECT j.node_id FROM page JOIN recovery.judgement j USING (node_id)
			WHERE NOT $2 OR EXISTS (SELECT FROM recovery.evidence e WHERE e.node_id = j.node_id
				AND e.part = 'endpoint/profile' AND e.source = 'session' AND e.reason = 'endpoint_profile_drift')
			ORDER BY j.node_id FOR UPDATE OF j
		), due AS (
			UPDATE recovery.judgement j SET due_at = mesh.clock() FROM concerned c WHERE j.node_id = c.node_id
		)
		SELECT count(*)::int AS nodes,
			COALESCE((SELECT p.node_id::text FROM page p ORDER BY p.node_id DESC LIMIT 1), '') AS last
		FROM page`)

	advanceProfileDue = pg.Define(pg.RoleRecovery, "drift.advance_profile_due", `
		UPDATE recovery.profile_due d SET after_node = $4
		WHERE d.fingerprint = $1 AND d.since = $2 AND d.after_node = $3`)

	endProfileDue = pg.Define(pg.RoleRecovery, "drift.end_profile_due", `
		DELETE FROM recovery.profile_due d WHERE d.fingerprint = $1 AND d.since = $2 AND d.after_node = $3`)
)

// profilesChanged notes the versions that have changed, whose nodes are to be judged. That a version is retiring
// concerns none: it was valid before and is.
func profilesChanged(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	var fingerprints []string
	var valid []bool
	for _, r := range records {
		if r.Kind != kindProfile {
			continue
		}
		v := &recoveryv1.ProfileVersion{}
		if err := r.Decode(v); err != nil {
			return err
		}
		if v.GetPhase() == recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRING {
			continue
		}
		fingerprints = append(fingerprints, v.GetProfile().GetFingerprint())
		valid = append(valid, v.GetPhase() != recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRED)
	}
	if len(fingerprints) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, noteProfilesDue, fingerprints, valid); err != nil {
		return fmt.Errorf("note profiles that have changed: %w", err)
	}
	return nil
}

// spreadProfiles makes a page of the nodes due that a changed version concerns. One replica at a time does so: it
// returns false while another one does. The row of the version is changed last, and only as it was read: the consumer
// changes it after rows of nodes too, so that it cannot be locked before them.
func (j *Judge) spreadProfiles(ctx context.Context) (bool, error) {
	mine := false
	err := pg.InTx(ctx, j.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if mine, err = pg.Value[bool](ctx, tx, takeSpread, int64(spreadLock)); err != nil || !mine {
			return err
		}
		row, err := pg.One[dueRow](ctx, tx, readProfileDue)
		if pg.IsNoRows(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read a profile that has changed: %w", err)
		}
		page, err := pg.One[pageRow](ctx, tx, dueReporting, row.Fingerprint, row.Valid, row.After, batch)
		if err != nil {
			return fmt.Errorf("make nodes due: %w", err)
		}
		if page.Nodes < batch {
			_, err = pg.Exec(ctx, tx, endProfileDue, row.Fingerprint, row.Since, row.After)
		} else {
			_, err = pg.Exec(ctx, tx, advanceProfileDue, row.Fingerprint, row.Since, row.After, page.Last)
		}
		if err != nil {
			return fmt.Errorf("note which nodes are due: %w", err)
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("have nodes judged for their profile: %w", err)
	}
	return mine, nil
}

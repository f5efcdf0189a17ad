package identity

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity/judge"
)

// RecoveryRefusal returns why a node in its state may not enrol with a recovery token; unspecified if it may. A hold
// for a lost join state is no reason: the recovery token proves the node, and ends that hold.
func RecoveryRefusal(r *Record) commonv1.Reason {
	if r.State == commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD && r.Alarm == AlarmJoinState {
		return commonv1.Reason_REASON_UNSPECIFIED
	}
	return judge.RefusalOf(r.State)
}

// Continue gives a node another certificate in the next slot and leaves its node instance, its generations and its
// present certificate as they are. A hold ends. The caller must save the record.
func Continue(ctx context.Context, tx pgx.Tx, r *Record, s Serial, by, reason string, m Moment) error {
	if err := Offer(ctx, tx, r, s); err != nil {
		return err
	}
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		r.Alarm = AlarmNone
		r.Enter(commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, by, reason, m.Now, m.Era)
	}
	r.decided = actionEnrol
	return nil
}

// Recovery tokens: those that came with certificates count from the first session that is ready on them.
var (
	countTokens = pg.Define(pg.RoleRecovery, "identity.count_recovery_tokens", `
		WITH counted AS (
			UPDATE recovery.recovery_token SET counted_since = mesh.clock()
			WHERE serial = ANY ($1) AND state = 'issued' AND counted_since IS NULL RETURNING node_id, token_id)
		UPDATE recovery.recovery_token t SET state = 'revoked', ended_by = 'replaced', state_at = mesh.clock()
		FROM counted c WHERE t.node_id = c.node_id AND t.token_id <> c.token_id AND t.state = 'issued'`)

	endRecoveryTokens = pg.Define(pg.RoleRecovery, "identity.end_recovery_tokens", `
		UPDATE recovery.recovery_token SET state = 'revoked', ended_by = $2, state_at = mesh.clock()
		WHERE node_id = $1 AND state IN ('issued', 'used')`)
)

// firstReady returns the certificates of promotions that no session was ready on before.
func firstReady(list []promotion) []string {
	var out []string
	for _, p := range list {
		if p.record.CurrentSerial != p.serial {
			out = append(out, p.serial)
		}
	}
	return out
}

// confirmTokens has the recovery tokens that came with certificates count, and ends the tokens of their nodes that
// were not used. A token that was used stays: another key that presents it is an alarm.
func confirmTokens(ctx context.Context, tx pgx.Tx, serials []string) error {
	if len(serials) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, countTokens, serials); err != nil {
		return fmt.Errorf("confirm recovery tokens: %w", err)
	}
	return nil
}

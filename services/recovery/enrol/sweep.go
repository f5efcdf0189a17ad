package enrol

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/services/recovery/rollback"
)

// Swept counts what one sweep ended.
type Swept struct{ Tokens, Claims, Sessions int64 }

// Sweep ends tokens past their time and claims past their lease, and forgets sessions whose answer nobody can ask for again. Nothing depends on it:
// every decision looks at the time itself. In rollback mode it ends nothing.
func (e *Enroller) Sweep(ctx context.Context) (Swept, error) {
	var out Swept
	if active, err := rollback.Active(ctx, e.deps.Pool); err != nil || active {
		return out, err //nolint:wrapcheck // it says what it did
	}
	for _, step := range []struct {
		count *int64
		what  string
		sql   string
	}{
		{&out.Tokens, "expire tokens", `UPDATE recovery.token SET state = 'expired', state_at = mesh.clock() WHERE token_id IN (
			SELECT token_id FROM recovery.token WHERE state = 'issued' AND expires_at <= mesh.clock() LIMIT 1000 FOR UPDATE SKIP LOCKED)`},
		{&out.Claims, "abandon claims", `UPDATE recovery.enrollment SET state = 'abandoned', ended_at = mesh.clock(), failure = 'its lease ran out'
			WHERE state = 'claimed' AND lease_until <= mesh.clock() - interval '1 minute'`},
		{&out.Sessions, "forget sessions", `DELETE FROM recovery.session_open WHERE session_id IN (
			SELECT o.session_id FROM recovery.session_open o JOIN recovery.identity i USING (node_id)
			WHERE o.opened_at <= mesh.clock() - interval '1 hour' AND i.confirmed_session_id IS DISTINCT FROM o.session_id LIMIT 5000)`},
	} {
		tag, err := e.deps.Pool.Exec(ctx, step.sql)
		if err != nil {
			return out, fmt.Errorf("%s: %w", step.what, err)
		}
		*step.count = tag.RowsAffected()
	}
	return out, nil
}

package enrol

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// Swept counts what one sweep ended.
type Swept struct{ Tokens, Claims, Sessions int64 }

// Sweep ends tokens that have expired and claims whose lease has run out, and deletes rows of sessions that are a day
// old: until then a node's sessions are counted, and long before no replica of nodeapi can request their answer again.
// No decision depends on it: each one checks the time itself. In rollback mode Sweep ends nothing.
func (e *Enroller) Sweep(ctx context.Context) (Swept, error) {
	var out Swept
	if active, err := rollback.Active(ctx, e.deps.Pool); err != nil || active {
		return out, err
	}
	for _, step := range []struct {
		count *int64
		what  string
		sql   *pg.Statement
	}{
		{&out.Tokens, "expire tokens", expireTokens},
		{&out.Claims, "abandon claims", abandonClaims},
		{&out.Sessions, "forget sessions", forgetSessions},
	} {
		tag, err := pg.Exec(ctx, e.deps.Pool, step.sql)
		if err != nil {
			return out, fmt.Errorf("%s: %w", step.what, err)
		}
		*step.count = tag.RowsAffected()
	}
	expired, err := tokens.Expire(ctx, e.deps.Pool, e.deps.Policy.Current().RecoveryTokenMaxAge())
	out.Tokens += expired
	return out, err
}

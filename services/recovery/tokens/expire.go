package tokens

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

const (
	// expireBatch is how many tokens of a profile one sweep ends.
	expireBatch = 500
	// extensible is how long a token that is too old stays as it is: an extension that is decided late makes it good
	// again. No decision depends on it: a token's age is weighed when it is used, and when it is listed.
	extensible = MaxExtension
)

// expireTokens ends tokens that are too old. The deadlines of tokens are in the order of the times from which they age,
// since a stop that counts for a later one counts for an earlier one at least as much. So the oldest of each profile
// are all that has to be looked at.
var expireTokens = pg.Define(pg.RoleRecovery, "tokens.expire", `
	WITH RECURSIVE aging AS (
		(SELECT t.profile FROM recovery.recovery_token t WHERE t.state = 'issued' ORDER BY t.profile LIMIT 1)
		UNION ALL
		SELECT (SELECT t.profile FROM recovery.recovery_token t WHERE t.state = 'issued' AND t.profile > a.profile
			ORDER BY t.profile LIMIT 1)
		FROM aging a WHERE a.profile IS NOT NULL
	), old AS (
		SELECT o.token_id, o.since FROM aging a CROSS JOIN LATERAL (
			SELECT t.token_id, COALESCE(t.counted_since, t.issued_at) AS since FROM recovery.recovery_token t
			WHERE t.profile = a.profile AND t.state = 'issued'
				AND COALESCE(t.counted_since, t.issued_at) <= mesh.clock() - make_interval(secs => $1::float8)
			ORDER BY COALESCE(t.counted_since, t.issued_at) LIMIT $2 FOR UPDATE SKIP LOCKED) o
		WHERE COALESCE(`+extendedSQL("a.profile")+`, '-infinity') <= mesh.clock()
	)
	UPDATE recovery.recovery_token t SET state = 'expired', state_at = mesh.clock() FROM old o
	WHERE t.token_id = o.token_id
		AND o.since + make_interval(secs => $1::float8 + `+creditSQL("o.since")+`) <= mesh.clock()`)

// Expire ends a batch of tokens of each profile that have been too old for so long that no extension makes them good,
// and returns how many. Retention deletes them later.
func Expire(ctx context.Context, q pg.Querier, maxAge time.Duration) (int64, error) {
	tag, err := pg.Exec(ctx, q, expireTokens, (maxAge + extensible).Seconds(), expireBatch)
	if err != nil {
		return 0, fmt.Errorf("expire recovery tokens: %w", err)
	}
	return tag.RowsAffected(), nil
}

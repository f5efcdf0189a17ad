package recovery

import (
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention/retentiontest"
)

// TestTermsFollowThePolicy: each retention key is the term of its own cuts.
func TestTermsFollowThePolicy(t *testing.T) {
	retentiontest.TermsFollow(t, pg.RoleRecovery, cuts, map[string][]string{
		policy.RetentionCredentialsSeconds: {"enrollments", "tokens", "recovery_tokens", "serials"},
		policy.RetentionIdentitiesSeconds:  {"instances", "identities", "epochs"},
		policy.RetentionRecoveriesSeconds: {
			"records", "verdict_periods", "issuance_stops", "token_extensions", "recovery_actions", "profiles", "incidents",
		},
	})
}

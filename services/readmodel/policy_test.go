package readmodel

import (
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention/retentiontest"
)

// TestTermsFollowThePolicy: each retention key is the term of its own cuts.
func TestTermsFollowThePolicy(t *testing.T) {
	retentiontest.TermsFollow(t, pg.RoleReadmodel, cuts, map[string][]string{
		policy.RetentionTimelineSeconds: {
			"tasks", "runs", "claims", "allocations", "instances", "workspaces", "nodes", "verdicts",
		},
		policy.RetentionFindingsSeconds:   {"findings"},
		policy.RetentionRecoveriesSeconds: {"verdict_periods", "recoveries", "incidents", "impacts"},
		policy.RetentionAuditSeconds:      {"audit"},
		policy.RetentionEventsSeconds:     {"events"},
	})
}

package tokens_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
)

// TestOnlyWhatHasEndedIsCut: a token that may be used, a stop that lasts and an extension in force stay, whatever the
// term.
func TestOnlyWhatHasEndedIsCut(t *testing.T) {
	s := newScene(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := s.pool.Exec(s.ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	node := ids.New()
	exec(`INSERT INTO recovery.identity (node_id, name, state, state_by, state_reason, state_at, created_at, version)
		VALUES ($1, 'node-1', 'pending', 'test', '', mesh.clock(), mesh.clock(), 0)`, node)
	for _, state := range []string{"issued", "used", "revoked"} {
		exec(`INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
			era, state, serial) VALUES ($1, $2, $2, $2, 'test', sha256('k'), 'k', 0, $3, $3)`, ids.New(), node, state)
	}
	exec(`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at)
		VALUES ($1, 'outage', mesh.clock(), NULL), ($2, 'outage', mesh.clock(), mesh.clock())`, ids.New(), ids.New())
	for _, ahead := range []string{"1 hour", "60 days"} {
		exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
			VALUES ($1, 'test', mesh.clock() + $2::interval, 'r', 'ada')`, ids.New(), ahead)
	}
	s.pass(20 * 24 * time.Hour)
	for name, want := range map[string]int64{"recovery_tokens": 2, "issuance_stops": 1, "token_extensions": 1} {
		var cut int64
		err := s.pool.QueryRow(s.ctx, `SELECT x.cut FROM recovery.cut_`+name+
			`('14 days', '00000000-0000-0000-0000-000000000000', 100) x`).Scan(&cut)
		if err != nil || cut != want {
			t.Errorf("%s: cut %d, want %d: %v", name, cut, want, err)
		}
	}
}

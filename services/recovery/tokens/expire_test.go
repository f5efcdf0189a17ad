package tokens_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// TestTokensThatAreTooOldExpire: a token ends when its age, the stops in it and the longest extension are over, and not
// while an extension of its profile is in force; retention deletes it then.
func TestTokensThatAreTooOldExpire(t *testing.T) {
	const day, maxAge = 24 * time.Hour, 24 * time.Hour
	s := newScene(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := s.pool.Exec(s.ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	node := ids.New()
	exec(`INSERT INTO recovery.identity (node_id, name, state) VALUES ($1, 'node-1', 'pending')`, node)
	issue := func(serial, profile, since string) {
		t.Helper()
		exec(`INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
			era, state, serial, counted_since) VALUES ($1, $2, $2, $2, $4, sha256('k'), 'k', 0, 'issued', $3,
			mesh.clock() + $5::interval)`, ids.New(), node, serial, profile, since)
	}
	expired := func(want ...string) {
		t.Helper()
		if _, err := tokens.Expire(s.ctx, s.pool, maxAge); err != nil {
			t.Fatal(err)
		}
		rows, err := s.pool.Query(s.ctx, `SELECT serial FROM recovery.recovery_token WHERE state = 'expired' ORDER BY serial`)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		var got []string
		for rows.Next() {
			var serial string
			if err := rows.Scan(&serial); err != nil {
				t.Fatal(err)
			}
			got = append(got, serial)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%v have expired, want %v", got, want)
		}
	}
	issue("1", "a", "0 hours")
	issue("2", "a", "2 days")
	issue("3", "b", "0 hours")
	// Of the first day nothing was issued in twelve hours, which the second token does not have.
	exec(`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at)
		VALUES ($1, 'outage', mesh.clock(), mesh.clock() + interval '12 hours')`, ids.New())
	exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
		VALUES ($1, 'b', mesh.clock() + interval '40 days', 'r', 'ada')`, ids.New())
	s.pass(day + tokens.MaxExtension + 11*time.Hour)
	expired()
	s.pass(2 * time.Hour)
	expired("1")
	s.pass(2 * day)
	expired("1", "2")
	s.pass(8 * day)
	expired("1", "2", "3")
	s.pass(15 * day)
	var cut int64
	err := s.pool.QueryRow(s.ctx, `SELECT x.cut FROM recovery.cut_recovery_tokens('14 days',
		'00000000-0000-0000-0000-000000000000', 100) x`).Scan(&cut)
	if err != nil || cut != 3 {
		t.Errorf("cut %d: %v", cut, err)
	}
}

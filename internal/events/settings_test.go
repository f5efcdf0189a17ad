package events_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestChangesOfSettingsAreHeard checks that a change of the policy and of the signing keys is notified at its commit,
// without a poll, and does not wake the consumers of events.
func TestChangesOfSettingsAreHeard(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	var numbered, settings events.Signal
	l, err := events.NewListener(events.ListenerDeps{
		Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered, Settings: &settings, Logger: testkit.Logger(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	begun := settings.C()
	start(t, l.Run)
	<-begun // it listens
	if !settings.Listening() {
		t.Fatal("the signal does not know of the connection")
	}
	for _, change := range []struct{ role, sql string }{
		{pg.RoleRecovery, `INSERT INTO mesh.policy (key, value, updated_at, updated_by, reason)
			VALUES ('k', '1', mesh.clock(), 'test', 'test')`},
		{pg.RoleRecovery, `UPDATE mesh.policy SET value = '2' WHERE key = 'k'`},
		{pg.RoleRecovery, `INSERT INTO mesh.key_rotation (rotation_id, kind, idempotency_key, requested_by, reason,
			requested_at)
			VALUES (gen_random_uuid(), 'task_signing', 'k', 'test', 'test', mesh.clock())`},
		{pg.RoleLifecycle, `INSERT INTO mesh.signing_key (kind, key_id, public_key, state, file, endorsed_by, endorsement,
			made_by, made_at, state_at)
			VALUES ('task_signing', 'k', decode(repeat('00', 32), 'hex'), 'signing', 'f', '', '', 'test', mesh.clock(),
				mesh.clock())`},
		{pg.RoleLifecycle, `UPDATE mesh.signing_key SET needed_by = 'a test' WHERE key_id = 'k'`},
	} {
		heard, other := settings.C(), numbered.C()
		if _, err := d.Pool(change.role).Exec(ctx, change.sql); err != nil {
			t.Fatal(err)
		}
		select {
		case <-heard:
		case <-ctx.Done():
			t.Fatalf("not heard: %s", change.sql)
		}
		select {
		case <-other:
			t.Errorf("a hint of events: %s", change.sql)
		default:
		}
	}
}

package judge_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
)

// tokened records that a node has a recovery token, issued now.
func (k *kit) tokened(n *machine) {
	k.t.Helper()
	k.exec(`INSERT INTO recovery.identity (node_id, name, state) VALUES ($1, $2, 'pending') ON CONFLICT DO NOTHING`,
		n.id(), "n-"+n.id())
	k.exec(`INSERT INTO recovery.recovery_token (token_id, node_id, node_instance_id, family, profile, key_sha256, key_id,
		era, state, serial) VALUES ($1, $2, $3, $3, 'test', sha256('k'), 'k', 0, 'issued', $4)`,
		ids.New(), n.id(), n.identity.GetNodeInstanceId(), ids.New())
}

func (k *kit) exec(sql string, args ...any) {
	k.t.Helper()
	_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, sql, args...)
	k.must(err)
}

// refused returns a node whose certificate the ingress refuses.
func (k *kit) refused(prepare func(*machine)) *machine {
	k.t.Helper()
	n := k.up()
	prepare(n)
	k.listen(5 * time.Second)
	k.lose(n)
	k.listen(5 * time.Second)
	k.put(k.refusal(n.id(), expired))
	k.round()
	return n
}

// TestANodeWithoutAUsableTokenDoesNotRecover: an agent that has no token sends no attempt, so recovery looks into its
// own rows when the ingress refuses the node.
func TestANodeWithoutAUsableTokenDoesNotRecover(t *testing.T) {
	age := func(k *kit) {
		k.exec(`UPDATE recovery.recovery_token SET issued_at = mesh.clock() - interval '25 hours'`)
	}
	for _, tt := range []struct {
		name    string
		prepare func(*kit)
		want    commonv1.DriftReason
	}{
		{"good", func(*kit) {}, certExpired},
		{"none", func(k *kit) { k.exec(`DELETE FROM recovery.recovery_token`) }, tokenMissing},
		{"revoked", func(k *kit) { k.exec(`UPDATE recovery.recovery_token SET state = 'revoked'`) }, tokenMissing},
		{"used", func(k *kit) { k.exec(`UPDATE recovery.recovery_token SET state = 'used'`) }, tokenMissing},
		{"too old", age, tokenMissing},
		{"counted later", func(k *kit) {
			age(k)
			k.exec(`UPDATE recovery.recovery_token SET counted_since = mesh.clock() - interval '23 hours'`)
		}, certExpired},
		{"old, with a stop", func(k *kit) {
			age(k)
			k.exec(`INSERT INTO recovery.issuance_stop (stop_id, reason, from_at, until_at) VALUES
				($1, 'outage', mesh.clock() - interval '9 hours', mesh.clock() - interval '7 hours')`, ids.New())
		}, certExpired},
		{"old, extended", func(k *kit) {
			age(k)
			k.exec(`INSERT INTO recovery.token_extension (extension_id, profile, until_at, reason, decided_by)
				VALUES ($1, 'test', mesh.clock() + interval '1 day', 'r', 'ada')`, ids.New())
		}, certExpired},
		{"recovery is off", func(k *kit) {
			k.must(policystore.Put(k.ctx, k.db.Pool(pg.RoleRecovery), policy.AutoRecovery, "false", "ada", "r"))
		}, blocked},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			n := k.refused(func(n *machine) { k.tokened(n); tt.prepare(k) })
			v := k.wantReasons(n.id(), tt.want)
			if tt.want != certExpired && v.GetUserState() != operator {
				t.Errorf("verdict %v", v)
			}
			if seen := k.count(`SELECT count(*) FROM recovery.evidence WHERE source = 'enrollment'`); tt.want == certExpired &&
				seen != 0 {
				t.Errorf("%d rows of a node that can return", seen)
			}
		})
	}
}

// TestATokenEndsThatOneIsMissing: a token that is issued, a session that serves, and the end of the refusals each end
// it.
func TestATokenEndsThatOneIsMissing(t *testing.T) {
	k := newKit(t)
	n := k.refused(func(*machine) {})
	k.wantReasons(n.id(), tokenMissing)
	k.tokened(n)
	k.listen(3 * time.Minute)
	k.put(k.refusal(n.id(), expired))
	k.round()
	k.wantReasons(n.id(), tokenMissing, certExpired)

	other := k.refused(func(*machine) {})
	k.wantReasons(other.id(), tokenMissing)
	k.attempt(other, "bootstrap", commonv1.Reason_REASON_UNSPECIFIED)
	k.round()
	k.wantReasons(other.id(), tokenMissing, certExpired)

	third := k.refused(func(*machine) {})
	k.back(third)
	k.round()
	k.wantReasons(third.id(), tokenMissing, unspecified)
	k.lose(third)
	k.round()
	k.wantReasons(third.id(), tokenMissing, unspecified)
}
